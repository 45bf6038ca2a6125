"""Which calls of an episode mattered, by the ground truth of the tools and of nothing else.

Before a call the answer is still within reach or it is not: what is missing, at one call each, must fit into the calls
that are left. A call *mattered* if it brought the answer nearer, or put it out of reach. What is done when all is lost
does not matter, nor does a detour that costs nothing.

    needed = 1 to answer, and if the right result was not calculated yet: 1 to calculate it
             + 1 for each of airline, refund and fare that no tool has told
    within reach: calls left >= needed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from trip_tools import MOST_CALLS, use
from trips import Trip, trip

from agl_core.types import Episode, Transition
from agl_rewards.evaluators import last_number

_FACTS = 3


class Effect(StrEnum):
    """What a call did to the chance of the right answer."""

    NEARER = "nearer"
    """It told a missing fact or the right result, or gave the right answer."""
    OUT_OF_REACH = "out of reach"
    """Before it the right answer could be reached, afterwards not."""
    NONE = "none"
    """Nothing: all was lost already, or it was a detour that could be afforded."""

    @property
    def mattered(self) -> bool:
        return self is not Effect.NONE


@dataclass(frozen=True)
class Reach:
    """How far the right answer is."""

    trip: Trip
    left: int = MOST_CALLS
    facts: frozenset[str] = frozenset()
    """Which of airline, refund and fare the tools have told."""
    calculated: bool = False
    answered: bool | None = None
    """Whether the answer was right; None before there is one."""

    @property
    def needed(self) -> int:
        """Calls to the right answer at best."""
        if self.answered:
            return 0
        return 1 if self.calculated else 2 + _FACTS - len(self.facts)

    @property
    def possible(self) -> bool:
        """Whether the right answer was given or can still be."""
        return self.answered is not False and self.left >= self.needed

    def after(self, tool_calls: Iterable[tuple[str, str]], content: str) -> Reach:
        """How far it is after a reply: tools by name and arguments, or, without any, an answer."""
        asked = list(tool_calls)
        if not asked:
            return replace(self, left=self.left - 1, answered=last_number(content) == float(self.trip.result))
        told = {_told(self.trip, name, arguments) for name, arguments in asked}
        return replace(
            self,
            left=self.left - 1,
            facts=self.facts | (told & {"airline", "refund", "fare"}),
            calculated=self.calculated or "result" in told,
        )


def effects(episode: Episode) -> list[Effect]:
    """What each call of an episode of this example did, in order."""
    reach = Reach(trip(episode.task.input["traveller"]))
    found = []
    for transition in episode.transitions:
        after = reach.after(_tool_calls(transition), transition.response.get("content") or "")
        found.append(_effect(reach, after))
        reach = after
    return found


def mattered(episode: Episode) -> list[bool]:
    """Whether each call of an episode of this example mattered, in order."""
    return [effect.mattered for effect in effects(episode)]


def first_tool(episode: Episode) -> str | None:
    """The tool that the first call asked for, if it asked for one."""
    names = [name for transition in episode.transitions[:1] for name, _ in _tool_calls(transition)]
    return names[0] if names else None


def _effect(before: Reach, after: Reach) -> Effect:
    if not before.possible:
        return Effect.NONE
    if not after.possible:
        return Effect.OUT_OF_REACH
    return Effect.NEARER if after.needed < before.needed else Effect.NONE


def _told(trip: Trip, name: str, arguments: str) -> str | None:
    """What a tool call told: airline, refund, fare, the right result, or nothing of use."""
    said = use(trip, name, arguments)
    facts = ("airline", "refund", "fare")
    return next(
        (fact for fact in facts if said == f"{fact} {getattr(trip, fact)}"),
        "result" if said == f"= {trip.result}" else None,
    )


def _tool_calls(transition: Transition) -> Sequence[tuple[str, str]]:
    calls: Sequence[Any] = transition.response.get("tool_calls") or ()
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
