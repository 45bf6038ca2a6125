"""The example's task source, as a plugin: `[tasks.train] source = "calc"`, `split = "train"`."""

from __future__ import annotations

from typing import Literal

from problems import Split, problem

import agl_core


@agl_core.endless_task_source(held_out=200)
def calc(index: int, seed: int, *, split: Literal["train", "eval", "eval_templates"]) -> agl_core.Task:
    """Arithmetic word problems. The result is metadata, which the agent does not see."""
    asked = problem(Split(split), seed, index)
    return agl_core.Task(f"{split}-{index}", {"question": asked.question}, split, {"result": asked.result})
