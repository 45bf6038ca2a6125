"""What a configuration asks of its engine, as far as that is known before an agent has run."""

from __future__ import annotations

import orjson

from agl_core.config.load import LoadedConfig
from agl_core.protocols import TaskSource
from agl_core.training.session import check_agent, first_made
from agl_core.types.estimates import Workload

CHARACTERS_PER_TOKEN = 3
TEMPLATE_TOKENS = 32
"""What a chat template and an instruction add to a task's input, roughly."""


def workload(loaded: LoadedConfig) -> Workload:
    """In rollouts of one call each: its prompt is the first task's input, its response as long as it may be.

    ConfigError if a source of tasks cannot make its first task.
    """
    config = loaded.config
    sources = {
        name: first_made(name, chosen.build(loaded.folder, config.seed)) for name, chosen in loaded.tasks.items()
    }
    check_agent(config, sources["train"])
    asked = orjson.dumps(sources["train"].task(0).input)
    return Workload(
        steps=config.train.steps,
        groups=config.train.groups_per_step,
        group_size=config.train.group_size,
        evaluated=sum(_evaluated(loaded, source) for name, source in sources.items() if name != "train"),
        prompt_tokens=TEMPLATE_TOKENS + len(asked) // CHARACTERS_PER_TOKEN,
        response_tokens=config.sampling.max_tokens,
    )


def _evaluated(loaded: LoadedConfig, source: TaskSource) -> int:
    """Rollouts of all evaluations on one held-out set: before training, every so many steps, and at the end."""
    chosen, steps = loaded.config.eval, loaded.config.train.steps
    times = 0 if chosen.every == 0 else 1 + -(-steps // chosen.every)
    tasks = chosen.tasks if source.size is None else min(chosen.tasks, source.size)
    return times * len(chosen.modes) * tasks
