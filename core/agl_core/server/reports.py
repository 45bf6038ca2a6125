"""What workers report of attempts, as records."""

from __future__ import annotations

from dataclasses import replace

from agl_core.store.interface import Record
from agl_core.types import Attempt, AttemptKey, Ending, Outcome, Reward
from agl_core.wire import CloseRequest

_LATE = "Its worker reported later that it was"


def reported(key: AttemptKey, request: CloseRequest) -> list[Record]:
    """What the agent's side tells of the attempt, as records; rewards of one name add up."""
    outcomes = [Outcome(rollout=key.rollout, attempt=key.attempt, **each.model_dump()) for each in request.outcomes]
    totals: dict[str, float] = {}
    for reward in request.rewards:
        totals[reward.name] = totals.get(reward.name, 0.0) + reward.value
    rewards = [Reward(*key, name=name, value=total, source="agent") for name, total in totals.items()]
    return [*outcomes, *rewards]


def reported_late(record: Attempt, request: CloseRequest) -> Attempt:
    """The record of a lost and superseded attempt with what its worker told after all: it keeps its ending.

    Only the first such report is kept; the same record comes back if there is nothing to add.
    """
    error = record.error or ""
    if record.ending is not Ending.LOST or request.ending is Ending.LOST or _LATE in error:
        return record
    error = f"{error} {_LATE} {request.ending}; that does not count.".lstrip()
    return replace(record, result=request.result, error=error)
