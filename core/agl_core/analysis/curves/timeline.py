"""Who waited for whom in a step: its rollouts, the engine and the trainer on one line of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agl_core.analysis.curves.metrics import MetricsLine
from agl_core.store.interface import Store
from agl_core.training.rollouts import counted_attempts
from agl_core.types import Mode

Interval: TypeAlias = tuple[float, float]
"""Start and end, in seconds since 1970."""

_MOST_ROLLOUTS = 120


@dataclass(frozen=True, slots=True)
class Bar:
    """An attempt at a rollout."""

    rollout: str
    start: float
    end: float
    said: str
    """How it ended."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step."""

    start: float
    end: float
    lanes: Sequence[Sequence[Bar]]
    """Attempts that ran one after another share a lane: there are as many lanes as ran at once."""
    engine: Sequence[Interval]
    """When it answered a call."""
    trainer: Sequence[tuple[str, float, float]]
    """What the trainer did from when to when: rollouts (it waited for them), update, other."""
    shown: int
    of: int
    """The number of the step's rollouts that are shown, and of all."""

    @property
    def waited(self) -> float:
        """Seconds for which the trainer waited for rollouts."""
        return sum(end - start for what, start, end in self.trainer if what == "rollouts")

    @property
    def idle_engine(self) -> float:
        """Seconds in which no call of these rollouts was being answered."""
        return self.end - self.start - sum(end - start for start, end in self.engine)

    @property
    def busy_lanes(self) -> float:
        """Rollouts that ran at once, on average."""
        return sum(bar.end - bar.start for lane in self.lanes for bar in lane) / max(self.end - self.start, 1e-9)


async def read_timeline(store: Store, step: int, lines: Sequence[MetricsLine]) -> Timeline | None:
    """The timeline of a training step; None if nothing of it was recorded, or its times were not."""
    every = await store.rollouts(step=step, mode=Mode.TRAIN)
    rollouts = every[:_MOST_ROLLOUTS]
    bars = [
        Bar(attempt.rollout, attempt.started, attempt.ended, attempt.ending.value if attempt.ending else "running")
        for attempt in await store.attempts(*(rollout.id for rollout in rollouts))
        if attempt.ended is not None
    ]
    trainer = _trainer([line for line in lines if line.kind == "train" and line.step == step])
    if not bars:
        return None
    calls = await store.calls(counted_attempts(rollouts))
    places = [*((bar.start, bar.end) for bar in bars), *((start, end) for _, start, end in trainer)]
    start, end = min(first for first, _ in places), max(last for _, last in places)
    engine = _together([(call.started, call.ended) for call in calls])
    return Timeline(start, end, _lanes(bars), engine, trainer, len(rollouts), len(every))


def _trainer(lines: Sequence[MetricsLine]) -> list[tuple[str, float, float]]:
    """From the last line of the step: when it was written, and how long each part took."""
    values = lines[-1].values if lines else {}
    if "time" not in values or "seconds/step" not in values:
        return []
    end = values["time"]
    start = end - values["seconds/step"]
    waited = start + values.get("seconds/rollouts", 0.0)
    updated = waited + values.get("seconds/update", 0.0)
    return [("rollouts", start, waited), ("update", waited, updated), ("other", updated, max(updated, end))]


def _lanes(bars: Sequence[Bar]) -> list[list[Bar]]:
    lanes: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda each: each.start):
        lane = next((each for each in lanes if each[-1].end <= bar.start), None)
        if lane is None:
            lanes.append([bar])
        else:
            lane.append(bar)
    return lanes


def _together(intervals: Sequence[Interval]) -> list[Interval]:
    """Their union.

    >>> _together([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)])
    [(0.0, 2.0), (3.0, 4.0)]
    """
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
