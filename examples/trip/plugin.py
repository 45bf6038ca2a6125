"""The example's plugin: the task source `trip`, and `memory_first`, a rate reported as a reward of weight 0.

[tasks.train]                       [rewards.memory_first]
source = "trip"                     weight = 0
split = "train"
"""

from __future__ import annotations

from typing import Any, Literal

from trips import Split, traveller, trip

import agl_core
from agl_core.types import Episode, Task


@agl_core.reward_rule
def memory_first(episode: Episode) -> float:
    """1 if the first call asked memory."""
    calls: Any = [call for t in episode.transitions[:1] for call in t.response.get("tool_calls") or ()]
    return float(bool(calls) and calls[0]["function"]["name"] == "memory")


@agl_core.endless_task_source(name="trip", held_out=200)
def cancelled_flight(index: int, seed: int, *, split: Literal["train", "eval"]) -> Task:
    """Cancelled flights. The model sees the question; the traveller's name leads the tools to the rest."""
    name = traveller(Split(split), seed, index)
    asked = trip(name)
    return Task(f"{split}-{index}", {"question": asked.question, "traveller": name}, split, {"result": asked.result})
