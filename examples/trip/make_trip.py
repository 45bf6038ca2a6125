"""Demonstrations for the tiny policy: an assistant that often does the right thing at the wrong time.

In each situation it chooses by fixed shares. What it was told is all that decides, not whether the answer can still be
reached: an assistant that began badly goes on quite sensibly, and in vain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

from recipes import Demonstrations, Message, Recipe, Shape, chooser, opened, says, uses
from trip_tools import MOST_CALLS, SYSTEM_PROMPT, TOOLS, use
from trips import Split, Trip, traveller, trip

PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"]["required"][0] for tool in TOOLS}


class Choice(Enum):
    """The next move: a tool and its argument, or an answer. The trip and the last tool's output fill them in."""

    ASK_AIRLINE = "memory", "airline"
    ASK_REFUND = "memory", "refund"
    ASK_SEAT = "memory", "seat"
    """Nothing is noted of it."""
    SEARCH_EVERYWHERE = "search", "to {trip.city}"
    """Times out."""
    SEARCH_AIRLINE = "search", "airline {trip.airline} to {trip.city}"
    SEARCH_CITY = "search", "to {trip.city} airline {trip.airline}"
    CALCULATE_WORDS = "calculator", "fare - refund"
    """There is nothing to calculate yet."""
    SUBTRACT = "calculator", "fare {trip.fare} - refund {trip.refund}"
    ADD = "calculator", "fare {trip.fare} + refund {trip.refund}"
    """The calculator does it without complaint."""
    ANSWER_FARE = None, "You pay fare {trip.fare}."
    """Forget the refund."""
    ANSWER = None, "You pay {output}."
    """Believe the last tool."""
    ANSWER_BRIEFLY = None, "It costs {output}."
    GUESS = None, "You pay = 0."
    """Never right: a refund is less than a fare."""


WRONG = {
    Choice.ASK_SEAT,
    Choice.SEARCH_EVERYWHERE,
    Choice.CALCULATE_WORDS,
    Choice.ADD,
    Choice.ANSWER_FARE,
    Choice.GUESS,
}
"""The other choices lead to the answer, made in the right situation."""


class Situation(StrEnum):
    """The knowledge from the tools so far."""

    ASKED = "nothing, and nothing was tried"
    FAILED = "nothing, though something was tried"
    AIRLINE = "the airline"
    REFUND = "the refund"
    NOTES = "airline and refund"
    FARE = "the fare, but no refund"
    FACTS = "fare and refund"
    RESULT = "the calculator's result"


SHARES: dict[Situation, dict[Choice, float]] = {
    Situation.ASKED: {
        Choice.ASK_AIRLINE: 0.16,
        Choice.ASK_REFUND: 0.16,
        Choice.SEARCH_EVERYWHERE: 0.4,
        Choice.CALCULATE_WORDS: 0.28,
    },
    Situation.FAILED: {
        Choice.ASK_AIRLINE: 0.45,
        Choice.ASK_REFUND: 0.15,
        Choice.ASK_SEAT: 0.1,
        Choice.SEARCH_EVERYWHERE: 0.1,
        Choice.CALCULATE_WORDS: 0.1,
        Choice.GUESS: 0.1,
    },
    Situation.AIRLINE: {
        Choice.SEARCH_AIRLINE: 0.3,
        Choice.SEARCH_CITY: 0.3,
        Choice.ASK_REFUND: 0.25,
        Choice.SEARCH_EVERYWHERE: 0.15,
    },
    Situation.REFUND: {Choice.ASK_AIRLINE: 0.85, Choice.SEARCH_EVERYWHERE: 0.15},
    Situation.NOTES: {Choice.SEARCH_AIRLINE: 0.42, Choice.SEARCH_CITY: 0.42, Choice.SEARCH_EVERYWHERE: 0.16},
    Situation.FARE: {Choice.ASK_REFUND: 0.85, Choice.ANSWER_FARE: 0.15},
    Situation.FACTS: {Choice.SUBTRACT: 0.8, Choice.ADD: 0.2},
    Situation.RESULT: {Choice.ANSWER: 0.44, Choice.ANSWER_BRIEFLY: 0.44, Choice.GUESS: 0.12},
}
"""How often each choice is demonstrated in each situation."""

_FLAWLESS = {
    situation: {choice: share for choice, share in choices.items() if choice not in WRONG}
    for situation, choices in SHARES.items()
}


@dataclass
class Told:
    """The knowledge from the tools in a conversation."""

    airline: bool = False
    refund: bool = False
    fare: bool = False
    result: bool = False
    calls: int = 0
    output: str = ""
    """The last tool's."""

    def ask(self, choice: Choice, task: Trip) -> list[Message]:
        """The call of the choice's tool, and its output."""
        tool, argument = choice.value
        arguments = json.dumps({PARAMETERS[tool]: argument.format(trip=task)})
        self.output = use(task, tool, arguments)
        self.airline |= choice is Choice.ASK_AIRLINE
        self.refund |= choice is Choice.ASK_REFUND
        self.fare |= tool == "search" and self.output.startswith("fare")
        self.result |= tool == "calculator" and self.output.startswith("=")
        self.calls += 1
        return uses(tool, arguments, self.output, f"call_{self.calls - 1}")

    @property
    def situation(self) -> Situation:
        if self.result:
            return Situation.RESULT
        if self.fare:
            return Situation.FACTS if self.refund else Situation.FARE
        if self.airline:
            return Situation.NOTES if self.refund else Situation.AIRLINE
        if self.refund:
            return Situation.REFUND
        return Situation.FAILED if self.calls else Situation.ASKED


def conversation(seed: int, index: int) -> list[Message]:
    """One demonstration; the same for the same arguments, always. It asks of one of training's trips."""
    return _drawn(f"demonstration/{seed}/{index}", seed, index, SHARES)


def lesson(seed: int, index: int) -> list[Message]:
    """The same of an assistant that makes no mistake."""
    return _drawn(f"lesson/{seed}/{index}", seed, index, _FLAWLESS)


def _drawn(name: str, seed: int, index: int, shares: Mapping[Situation, Mapping[Choice, float]]) -> list[Message]:
    # Training runs have seeds from 0 up: these trips are others.
    task = trip(traveller(Split.TRAIN, -1 - seed, index))
    return behave(task, chooser(name, shares))


def behave(task: Trip, choose: Callable[[Situation], Choice]) -> list[Message]:
    """The whole conversation of an assistant that chooses like this, as the assistant sends it."""
    messages, known = opened(SYSTEM_PROMPT, task.question), Told()
    for _ in range(MOST_CALLS):
        choice = choose(known.situation)
        tool, text = choice.value
        if tool is None:
            return [*messages, says(text.format(trip=task, output=known.output))]
        messages += known.ask(choice, task)
    return messages[:-1]


RECIPE = Recipe(
    Demonstrations(conversation, TOOLS, lesson),
    Shape(vocabulary=480, hidden=64, layers=2, heads=2, kv_heads=2, initializer_range=0.125),
    steps=1000,
    batch=16,
    learning_rate=3e-3,
)
