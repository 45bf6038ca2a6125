"""The lifecycle of rollouts and attempts: every state there is, and every way from one to another.

    rollout   queued ─▶ running ─▶ done          attempt   open ─▶ closing ─▶ counted
                 ▲         │                                  │        └────▶ superseded
                 └─────────┘ tried again                      └─▶ withdrawn

A rollout ends once; of its attempts at most one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import TypeVar

from agl_core.errors import ServerError
from agl_core.types import Ending, Rollout, RolloutState


class AttemptState(StrEnum):
    """Where an attempt is in its life."""

    OPEN = "open"
    """A worker holds it, and its calls count."""
    CLOSING = "closing"
    """Its end is being written; a call that comes now does not count."""
    COUNTED = "counted"
    """Its rollout ended with it."""
    SUPERSEDED = "superseded"
    """Its rollout was tried again; what is still reported of it is recorded and does not count."""
    WITHDRAWN = "withdrawn"
    """Its start could not be written: no worker ever had it."""


State = TypeVar("State", RolloutState, AttemptState)

ROLLOUT: Mapping[RolloutState, frozenset[RolloutState]] = {
    RolloutState.QUEUED: frozenset({RolloutState.RUNNING, RolloutState.DONE}),
    RolloutState.RUNNING: frozenset({RolloutState.QUEUED, RolloutState.DONE}),
    RolloutState.DONE: frozenset(),
}
"""Where a rollout may go: from queued to done only when it is cancelled, from running to queued to be tried again."""

ATTEMPT: Mapping[AttemptState, frozenset[AttemptState]] = {
    AttemptState.OPEN: frozenset({AttemptState.CLOSING, AttemptState.WITHDRAWN}),
    AttemptState.CLOSING: frozenset({AttemptState.COUNTED, AttemptState.SUPERSEDED}),
    AttemptState.COUNTED: frozenset(),
    AttemptState.SUPERSEDED: frozenset(),
    AttemptState.WITHDRAWN: frozenset(),
}
"""Where an attempt may go."""


def step(table: Mapping[State, frozenset[State]], name: str, now: State, to: State) -> State:
    """`to`, if the table allows it; ServerError names what cannot go there.

    >>> step(ROLLOUT, "rollout a", RolloutState.QUEUED, RolloutState.RUNNING)
    <RolloutState.RUNNING: 'running'>
    """
    if to not in table[now]:
        raise ServerError(f"The {name} is {now} and cannot become {to}. This is a mistake in agl; please report it.")
    return to


def moved(rollout: Rollout, to: RolloutState, *, ending: Ending | None = None, counted: int | None = None) -> Rollout:
    """The rollout in its next state; `ending` and the attempt that counts belong to one that is done."""
    state = step(ROLLOUT, f"rollout {rollout.id}", rollout.state, to)
    return replace(rollout, state=state, ending=ending, counted_attempt=counted)
