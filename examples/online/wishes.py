"""The example's plugin: the task source `wishes`, travellers' wishes with their right answers.

[tasks.eval]
source = "wishes"
names_airline = true
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from flights import AIRLINES, CITIES, DAYS, Wish

import agl_core
from agl_core.types import Task


@agl_core.task_source
def wishes(*, names_airline: bool) -> Iterator[Task]:
    """All wishes that name an airline, or all that name none, in a fixed random order."""
    drawn = [Wish(*each) for each in itertools.product(CITIES, DAYS, AIRLINES if names_airline else (None,))]
    random.Random(0).shuffle(drawn)
    kind = "airline" if names_airline else "any"
    for index, wish in enumerate(drawn):
        yield Task(f"{kind}-{index}", {"question": wish.question}, metadata={"result": wish.result})
