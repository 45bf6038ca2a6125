"""What is checked before training: tasks and agent, what a run asks of the engine, and one rollout of the agent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from agl_core.config.load import LoadedConfig
from agl_core.config.models import RunConfig
from agl_core.errors import AglError, ConfigError, last_frames
from agl_core.learning.health import health_of
from agl_core.learning.rewards import AGENT_SOURCE
from agl_core.protocols import RecordedTasks, TaskSource
from agl_core.training.alarms import Alarm
from agl_core.training.failures import common_failure, failures
from agl_core.training.metrics import Phase
from agl_core.training.rollouts import plan_look
from agl_core.types import Episode, Workload

if TYPE_CHECKING:
    from agl_core.training.session import Session

CHARACTERS_PER_TOKEN = 3
TEMPLATE_TOKENS = 32
"""What a chat template and an instruction add to a task's input, roughly."""


def workload(loaded: LoadedConfig) -> Workload:
    """In rollouts of one call each: its prompt is the first task's input, its response as long as it may be.

    ConfigError if a source of tasks cannot make its first task.
    """
    config, train, held_out = loaded.config, loaded.config.train, loaded.config.eval
    sources = {
        name: first_made(name, chosen.build(loaded.folder, config.seed)) for name, chosen in loaded.tasks.items()
    }
    check_agent(config, sources["train"])
    # Each held-out set is evaluated before training, every so many steps, and at the end.
    evaluations = 0 if held_out.every == 0 else 1 + -(-train.steps // held_out.every)
    tasks = sum(
        min(held_out.tasks, source.size or held_out.tasks) for name, source in sources.items() if name != "train"
    )
    return Workload(
        steps=train.steps,
        groups=train.groups_per_step,
        group_size=train.group_size,
        evaluated=evaluations * len(held_out.modes) * tasks,
        prompt_tokens=TEMPLATE_TOKENS + len(orjson.dumps(sources["train"].task(0).input)) // CHARACTERS_PER_TOKEN,
        response_tokens=config.sampling.max_tokens,
    )


def first_made(name: str, source: TaskSource) -> TaskSource:
    """The source of tasks, once its first task was made. ConfigError if that fails, or if it has none."""
    try:
        if source.size == 0:
            raise ValueError("it has no tasks")
        orjson.dumps(source.task(0).input)
    except AglError:
        raise
    except Exception as error:
        raise ConfigError(
            f"[tasks.{name}]: the first task cannot be made ({type(error).__name__}: {error}).\n{last_frames(error)}"
        ) from error
    return source


def check_agent(config: RunConfig, source: TaskSource) -> None:
    """ConfigError if rollouts are to be run and there is no agent, or if no recorded group can be trained on."""
    held_out = [name for name in config.tasks if name != "train"]
    if not isinstance(source, RecordedTasks):
        if config.agent is None:
            raise ConfigError("[agent]: the configuration names no agent, which training needs. Set agent.entry.")
        return
    if held_out and config.agent is None:
        raise ConfigError(
            f"[agent]: the configuration names no agent, which the held-out tasks [tasks.{held_out[0]}] are for. Set "
            f"agent.entry, or leave the held-out tasks out."
        )
    least = min(config.train.min_group_size, config.train.group_size)
    if all(source.members(index) < least for index in range(source.size)):
        raise ConfigError(
            f"[tasks.train]: no recorded task has {least} rollouts (train.min_group_size), so nothing could be "
            f"compared and all would be dropped. Set train.group_size = 1, and an algorithm that compares no groups, "
            f"such as 'reinforce++'."
        )


@dataclass(frozen=True, slots=True)
class Look:
    """The agent's first rollouts, before it is trained."""

    seen: list[str]
    """Each of them in words."""
    fault: Alarm | None
    """How all of them failed, with the first error and what to do; None: at least one finished."""


async def first_look(session: Session, phase: Phase) -> Look:
    """Run the agent on the first task, as evaluation runs it. PluginError if the reward rules fail.

    If that rollout fails it may be the policy's doing, so two more decide.
    """
    planned = plan_look(session.tasks["train"], run=session.run, restart=session.restart)
    episodes = (await session.collector.collect([planned[:1]], phase)).episodes
    if common_failure(episodes) is not None:
        episodes += (await session.collector.collect([[rollout] for rollout in planned[1:]], phase)).episodes
    fault = None if common_failure(episodes) is None else await failures(session.server.store, episodes)
    problems = session.worker.worker.problems if session.worker and session.worker.worker else {}
    return Look([*map(_described, episodes), *(f"problem: {problem}" for problem in problems)], fault)


def _described(episode: Episode) -> str:
    """Ending, calls, agents, tools, reward and health of a rollout."""
    calls = Counter(t.agent or "an unnamed agent" for t in episode.transitions)
    by = f" by {', '.join(calls)}" if calls else ""
    results = [*(result for t in episode.transitions for result in t.tool_results), *episode.unjoined]
    tools = ", ".join(f"{result.tool} {result.status}" for result in results) or "none"
    parts = ", ".join(f"{r.name} {r.value:.3g}" for r in episode.rewards if r.call is None and r.source != AGENT_SOURCE)
    reward = "none" if episode.terminal is None else f"{episode.terminal:.3g}" + (f" ({parts})" if parts else "")
    return (
        f"task {episode.task.id}: {episode.ending}, {calls.total()} calls{by}; tools: {tools}; reward: {reward}; "
        f"{health_of(episode).text}"
    )
