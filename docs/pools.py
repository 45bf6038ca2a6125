"""A plugin for docs/make_measured.py: the first tasks of an example that makes them without end, so that they recur."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import agl_core
from agl_core.types import Task


@agl_core.task_source
def pool(*, of: Literal["calc", "sql"], size: int) -> Iterator[Task]:
    """The first tasks of training, with seed 0, of examples/calc or examples/sql."""
    sys.path.append(str(Path(__file__).parents[1] / "examples" / of))
    if of == "calc":
        from tasks import calc as task
    else:
        from sql_tasks import sql as task
    for index in range(size):
        yield task(index, 0, split="train")
