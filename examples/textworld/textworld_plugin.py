"""The plugin of TextWorld's quests: the task source `quests`, and the reward rule `won`.

[tasks.eval]                        [rewards.won]
source = "quests"
split = "eval"
"""

from __future__ import annotations

from collections.abc import Iterator

import agl_core
from agl_core.types import Episode, Task

SEEDS = {"train": range(64), "eval": range(1000, 1050)}


@agl_core.reward_rule
def won(episode: Episode) -> float:
    """1 if the quest was won."""
    return float(episode.result or 0.0)


@agl_core.task_source
def quests(*, calls: int = 20, split: str = "train") -> Iterator[Task]:
    """Quests of other seeds in training and in evaluation."""
    for seed in SEEDS[split]:
        yield Task(f"textworld-{split}-{seed}", {"seed": seed, "calls": calls}, split)
