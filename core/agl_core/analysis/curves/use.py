"""What users said of a deployed run, session by session."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from agl_core.analysis.curves.plots import Use
from agl_core.analysis.runs import has_store, open_store
from agl_core.learning.feedback import said
from agl_core.store.interface import SessionStore
from agl_core.types import AttemptKey, Feedback, Mode, RolloutState

WINDOW = 100
"""Sessions over which feedback is averaged."""


async def read_use(folder: Path, promotions: Sequence[float]) -> Use:
    """The feedback on a run's sessions in windows, in the order of their ends; one without feedback has no point.

    `promotions` are the times at which another version became the stable one, in Unix seconds.
    """
    if not has_store(folder):
        return Use()
    async with open_store(folder) as store:
        if not isinstance(store, SessionStore):
            return Use()
        done = await store.rollouts(mode=Mode.USE, state=RolloutState.DONE)
        ends = {each.rollout: each.ended or each.started for each in await store.attempts(*(each.id for each in done))}
        heard: defaultdict[str, list[Feedback]] = defaultdict(list)
        for each in await store.feedback([AttemptKey(id, 0) for id in ends]):
            heard[each.rollout].append(each)
    order = sorted(ends, key=lambda id: ends[id])
    points = []
    for last in range(WINDOW, len(order) + 1, WINDOW):
        values = [value for id in order[last - WINDOW : last] if (value := _mean(heard[id])) is not None]
        if values:
            points.append((last, mean(values)))
    times = sorted(ends.values())
    return Use(points, [bisect_right(times, each) for each in promotions])


def _mean(feedback: Sequence[Feedback]) -> float | None:
    """The mean of the numbers that were given, of each name the latest; None: there is none."""
    numbers = [values[-1] for names in said(feedback).values() for values in names.values()]
    return mean(numbers) if numbers else None
