"""A plugin for docs/make_measured.py: the first tasks of calc, which makes them without end, so that they recur."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import agl_core
from agl_core.types import Task


@agl_core.task_source
def pool(*, of: Literal["calc"], size: int) -> Iterator[Task]:
    """The first tasks of training, with seed 0, of examples/calc."""
    sys.path.append(str(Path(__file__).parents[1] / "examples" / of))
    from tasks import calc

    for index in range(size):
        yield calc(index, 0, split="train")
