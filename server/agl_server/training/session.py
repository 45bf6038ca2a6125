"""One run's parts, started in order and stopped in reverse; and what is checked before training."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import orjson
from pydantic_core import to_jsonable_python

from agl_core.client.agent import agent_environment, client_variables
from agl_core.client.local import WorkerProcesses, WorkerThread, choose_runner, workers_beside
from agl_core.config.load import LoadedConfig
from agl_core.config.models import RunConfig
from agl_core.errors import AglError, ConfigError, EngineError, last_frames
from agl_core.learning.rewards import AGENT_SOURCE
from agl_core.protocols import Engine, EngineContext, PolicySpec, RecordedTasks, TaskSource, Upstream
from agl_core.types import AlarmName, Ending, Episode, Mode, Rollout, Run, scored_return
from agl_core.wire import SERVER_FILE
from agl_server.health.alarms import StallWatch, alarm_of_failures, alarms_on, common_failure
from agl_server.health.rollouts import health_of
from agl_server.health.table import Alarm, Numbers
from agl_server.server import LightningServer
from agl_server.training.evaluation import Evaluator, HeldOutReplies
from agl_server.training.metrics import Observer
from agl_server.training.recorded import Recordings
from agl_server.training.rollouts import Collector, group_of, scoring_rules


@dataclass(frozen=True)
class Session:
    server: LightningServer
    run: str
    """The run's name in its store."""
    restart: int
    engine: Engine
    upstream: Upstream
    workers: WorkerProcesses | WorkerThread | None
    """The workers on this machine; None: the rollouts are left to workers elsewhere."""
    collector: Collector
    evaluator: Evaluator
    tasks: Mapping[str, TaskSource]
    stall: StallWatch

    @property
    def versions(self) -> dict[str, int]:
        """The version being served of each policy; the gateway records them with the calls."""
        return self.server.versions


async def begin_restart(server: LightningServer, config: RunConfig, run_dir: Path, resumed_step: int | None) -> Run:
    """Begin the run's next restart, which goes on from the checkpoint of `resumed_step`; None: from none."""
    runs = await server.store.runs()
    name = runs[-1].id if runs else run_dir.name  # The folder may have been moved since.
    restart = 1 + max((run.restart for run in runs if run.id == name), default=-1)
    run = Run(name, restart, time.time(), config.model_dump(mode="json"), resumed_step if restart else None)
    await server.begin(run)
    server.keys.write(run_dir / SERVER_FILE, server.base_url, begun=True)
    return run


@asynccontextmanager
async def open_session(
    loaded: LoadedConfig,
    run_dir: Path,
    server: LightningServer,
    observer: Observer,
    *,
    weights: Path | None = None,
    resumed_step: int | None = None,
    own_engine: Engine | None = None,
) -> AsyncIterator[Session]:
    """Begin a run's next restart on its server, start the engine and, unless workers are elsewhere, workers.

    `weights` is a checkpoint, `resumed_step` its step if training goes on; `own_engine` replaces the configured one.
    """
    config = loaded.config
    # Errors in tasks, rules or the agent are raised before an engine is started, which takes long.
    tasks, rules = task_sources(loaded), scoring_rules(loaded)
    runner = None
    if config.workers.processes != 0 and config.agent is not None:
        with agent_environment(client_variables(server.base_url)):
            runner = await asyncio.to_thread(choose_runner, config, loaded.plugins, server.base_url)
    run = await begin_restart(server, config, run_dir, resumed_step)
    async with AsyncExitStack() as stack:
        starting = None
        if runner is not None:
            beside = workers_beside(config, runner, server.base_url, server.worker_key)
            starting = asyncio.create_task(beside)  # It takes about as long as the engine's start.
            stack.push_async_callback(_stop, starting)
        observer.say("starting the engine")
        engine: Engine = own_engine or loaded.engine.build(engine_context(loaded, run_dir))
        stack.push_async_callback(engine.stop)
        engine.report_stages(lambda stage, seconds: observer.say(f"the engine, after {seconds:.0f} s: {stage}"))
        upstream = await engine.start()
        if weights is not None:
            await engine.load(weights)
        server.serve(upstream, await engine.versions())
        stack.callback(server.relay.disconnect)
        workers = None
        if starting is not None:
            workers = await starting
            # Until the stack is closed, clients that agents make find the server.
            stack.enter_context(agent_environment(client_variables(server.base_url)))
            stack.push_async_callback(workers.stop)
            workers.begin()
        elif config.agent is not None:
            observer.say(f"leaving the rollouts to workers, which join with: agl worker {run_dir}")
        setting = config.alarms.get(AlarmName.STALL)
        stall = StallWatch(setting, server.activity, server.store, observer.say)

        def check_health() -> None:
            engine.check()
            if workers is not None and not workers.alive:
                raise EngineError("The workers stopped unexpectedly; see the log above. The run can be resumed.")

        endings, keep, hook = config.train.endings, config.train.housekeeping, loaded.plugins.hook
        collector = Collector(server.store, server.queue, rules, endings, hook, check_health, stall, keep)
        held_out = {name: tasks[name] for name in tasks if name != "train"}
        replies = [
            HeldOutReplies(name, Recordings(of_set, loaded, engine, imitated=True), upstream.context_length)
            for name, of_set in held_out.items()
            if isinstance(of_set, RecordedTasks)
        ]
        of_rollouts = {name: of_set for name, of_set in held_out.items() if not isinstance(of_set, RecordedTasks)}
        evaluator = Evaluator(collector, of_rollouts, config.eval, run.id, run.restart, observer, replies)
        yield Session(server, run.id, run.restart, engine, upstream, workers, collector, evaluator, tasks, stall)


async def _stop(starting: asyncio.Task[WorkerProcesses | WorkerThread]) -> None:
    starting.cancel()
    with suppress(asyncio.CancelledError):
        await (await starting).stop()


def engine_context(loaded: LoadedConfig, run_dir: Path) -> EngineContext:
    config = loaded.config
    return EngineContext(
        run_dir=run_dir,
        seed=config.seed,
        policies={
            name: PolicySpec(
                model=loaded.weights(name),
                dtype=policy.model.dtype,
                trust_remote_code=policy.model.trust_remote_code,
                lora=policy.model.lora,
                optimizer=policy.optimizer,
                algorithm=loaded.policies[name].algorithm.component.name,
                algorithm_options=to_jsonable_python(loaded.policies[name].algorithm.options.model_dump()),
                name=policy.model.path,
            )
            for name, policy in config.policies.items()
        },
        deterministic=config.train.deterministic,
        steps=config.train.steps,
        plugin_files=config.plugin_files,
        api_key=os.urandom(16).hex(),
    )


def task_sources(loaded: LoadedConfig) -> dict[str, TaskSource]:
    """The task source of each set, once its first task was made. ConfigError if one fails, is empty or does not fit."""
    sources: dict[str, TaskSource] = {}
    for name, chosen in loaded.tasks.items():
        source = sources[name] = chosen.build(loaded.config.folder, loaded.config.seed)
        try:
            if source.size == 0:
                raise ValueError("it has no tasks")
            orjson.dumps(source.task(0).input)
        except AglError:
            raise
        except Exception as error:
            raise ConfigError(
                f"[tasks.{name}]: the first task cannot be made ({type(error).__name__}: {error}).\n"
                f"{last_frames(error)}"
            ) from error
    check_agent(loaded.config, sources, compares=loaded.compares)
    return sources


def check_agent(config: RunConfig, sources: Mapping[str, TaskSource], *, compares: bool) -> None:
    """ConfigError if rollouts are to be run and there is no agent, or if no recorded group can be trained on."""
    fresh = [name for name, source in sources.items() if not isinstance(source, RecordedTasks)]
    if fresh and config.agent is None:
        raise ConfigError(
            f"[agent]: the configuration names no agent, which [tasks.{fresh[0]}] needs. Set agent.entry, or have "
            f"recorded tasks there."
        )
    source = sources["train"]
    if not isinstance(source, RecordedTasks) or not compares:
        return
    if all(source.members(index) < 2 for index in range(source.size)):
        raise ConfigError(
            "[tasks.train]: no recorded task has two rollouts, so nothing could be compared and all would be dropped. "
            "Set an algorithm that compares no groups, such as 'reinforce++', and reward rules that compare none."
        )


_MAX_LOOKS = 8
"""Rollouts before training begins, where a policy that is still weak makes an agent fail."""


@dataclass(frozen=True, slots=True)
class Look:
    """The agent's first rollouts, before it is trained."""

    seen: list[tuple[bool, str]]
    """Each rollout in words, with True if it finished; then missing rewards or results, and problems of the worker."""
    fault: Alarm | None
    """How all of them failed, with the first error and what to do; None: at least one finished."""
    are_answered: bool = False
    """The model replied in each rollout, so that its replies may be why they failed."""
    episodes: Sequence[Episode] = ()


async def first_look(session: Session, observer: Observer) -> Look:
    """Run the agent on the first task, as evaluation runs it. PluginError if the reward rules fail.

    If it fails, a weak policy may be why, so more decide: three in all, or eight if each crashed after a reply.
    """
    if isinstance(session.tasks["train"], RecordedTasks):
        return Look([], None)
    task = session.tasks["train"].task(0)
    first = Rollout("", session.run, session.restart, "s0-look", task, Mode.EVAL_SAMPLED, 0, 0, position=0)
    planned = group_of(first, _MAX_LOOKS)
    episodes: list[Episode] = []
    with observer.phase("first look", 0) as advance:
        for until in (1, 3, _MAX_LOOKS):
            episodes += await session.collector.collect([[r] for r in planned[len(episodes) : until]], advance)
            failure, are_answered = common_failure(episodes), all(episode.transitions for episode in episodes)
            if failure is None or (until == 3 and (failure is not Ending.CRASHED or not are_answered)):
                break
    fault = await alarm_of_failures(session.server.store, episodes)
    problems = session.workers.problems if session.workers else {}
    seen = [(episode.ending is Ending.FINISHED, _described(episode)) for episode in episodes]
    lacking = alarms_on(episodes, (AlarmName.NO_REWARD, AlarmName.NO_RESULT))
    seen += [(False, text) for text in (*(a.text for a in lacking), *(f"problem: {problem}" for problem in problems))]
    return Look(seen, fault, are_answered, episodes)


def estimate_tokens(loaded: LoadedConfig, session: Session, look: Look, took: Numbers) -> tuple[int, Numbers]:
    """Rollouts of the whole run, and their tokens by kind, if all are like those of the look, which `took` so many."""
    train, every, evaluator = loaded.config.train, loaded.config.eval.every, session.evaluator
    calls = [(t.prompt_ids, t.response_ids) for episode in look.episodes for t in episode.transitions]
    rows = [((*prompt,), (*prompt, *reply)) for prompt, reply in calls if prompt is not None and reply is not None]
    # A row of an update is a call with all that it continues.
    whole = (row for n, (_, row) in enumerate(rows, 1) if not any(prompt[: len(row)] == row for prompt, _ in rows[n:]))
    epochs = max(getattr(plan.algorithm.options, "epochs", 1) for plan in loaded.policies.values())
    planned = (evaluator.planned(0, name, mode) for name in evaluator.sets for mode in evaluator.settings.modes)
    evaluations = len({0, train.steps, *range(0, train.steps, every)}) if every else 0
    trained = train.steps * train.groups_per_step * train.group_size
    rollouts, passes = trained + evaluations * sum(map(len, planned)), trained * epochs * sum(map(len, whole))
    tokens = {"prefilled": took["prefilled"] * rollouts, "decoded": took["decoded"] * rollouts}
    tokens |= {"trained": passes} if "trained" in took else {}
    return rollouts, {kind: count / len(look.episodes) for kind, count in tokens.items()}


def _described(episode: Episode) -> str:
    """Ending, calls, agents, tools, reward and health of a rollout."""
    calls = Counter(t.agent or "an unnamed agent" for t in episode.transitions)
    by = f" by {', '.join(calls)}" if calls else ""
    results = [*(result for t in episode.transitions for result in t.tool_results), *episode.unjoined]
    tools = ", ".join(f"{result.tool} {result.status}" for result in results) or "none"
    parts = ", ".join(f"{r.name} {r.value:.3g}" for r in episode.rewards if r.call is None and r.source != AGENT_SOURCE)
    value = scored_return(episode)
    reward = "none" if value is None else f"{value:.3g}" + (f" ({parts})" if parts else "")
    return (
        f"task {episode.task.id}: {episode.ending}, {calls.total()} calls{by}; tools: {tools}; reward: {reward}; "
        f"{health_of(episode).text}"
    )
