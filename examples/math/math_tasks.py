"""The example's task source, as a plugin: `[tasks.train] source = "math"`, `split = "train"`."""

from __future__ import annotations

from math_problems import Split, problem

import agl_core


@agl_core.endless_task_source(held_out=100)
def math(index: int, seed: int, *, split: Split) -> agl_core.Task:
    """Problems of several steps. The result is metadata, which the agent does not see."""
    asked = problem(split, seed, index)
    return agl_core.Task(f"{split}-{index}", {"question": asked.question}, split, {"result": asked.result})
