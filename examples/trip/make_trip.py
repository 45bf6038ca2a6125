"""Demonstrations for the tiny policy: an assistant that often does the right thing at the wrong time.

In each situation it chooses by fixed shares. What it was told is all that decides, not whether the answer can still be
reached: an assistant that began badly goes on quite sensibly, and in vain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from recipes import Demonstrations, Message, Recipe, Shape, chooser, opened, says, uses
from trip_tools import MOST_CALLS, SYSTEM_PROMPT, TOOLS, use
from trips import Split, Trip, traveller, trip


@dataclass(frozen=True)
class Asks:
    tool: str
    arguments: dict[str, str]

    @property
    def text(self) -> str:
        """The arguments as the model writes them."""
        return json.dumps(self.arguments)


Reply: TypeAlias = Asks | str
Choice: TypeAlias = Callable[[Trip, str], Reply]
"""The next move, given the trip and the last tool's output."""


def ask_airline(trip: Trip, output: str) -> Reply:
    return Asks("memory", {"key": "airline"})


def ask_refund(trip: Trip, output: str) -> Reply:
    return Asks("memory", {"key": "refund"})


def ask_seat(trip: Trip, output: str) -> Reply:
    """Nothing is noted of it."""
    return Asks("memory", {"key": "seat"})


def search_everywhere(trip: Trip, output: str) -> Reply:
    """Times out."""
    return Asks("search", {"query": f"to {trip.city}"})


def search_airline(trip: Trip, output: str) -> Reply:
    return Asks("search", {"query": f"airline {trip.airline} to {trip.city}"})


def search_city(trip: Trip, output: str) -> Reply:
    """The same in other words."""
    return Asks("search", {"query": f"to {trip.city} airline {trip.airline}"})


def calculate_words(trip: Trip, output: str) -> Reply:
    """There is nothing to calculate yet."""
    return Asks("calculator", {"expression": "fare - refund"})


def subtract(trip: Trip, output: str) -> Reply:
    return Asks("calculator", {"expression": f"fare {trip.fare} - refund {trip.refund}"})


def add(trip: Trip, output: str) -> Reply:
    """The calculator does it without complaint."""
    return Asks("calculator", {"expression": f"fare {trip.fare} + refund {trip.refund}"})


def answer_fare(trip: Trip, output: str) -> Reply:
    """Forget the refund."""
    return f"You pay fare {trip.fare}."


def answer(trip: Trip, output: str) -> Reply:
    """Believe the last tool."""
    return f"You pay {output}."


def answer_briefly(trip: Trip, output: str) -> Reply:
    """The same in other words."""
    return f"It costs {output}."


def guess(trip: Trip, output: str) -> Reply:
    """Never right: a refund is less than a fare."""
    return "You pay = 0."


RIGHT = (ask_airline, ask_refund, search_airline, search_city, subtract, answer, answer_briefly)
"""The choices that lead to the answer, made in the right situation."""


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
    Situation.ASKED: {ask_airline: 0.16, ask_refund: 0.16, search_everywhere: 0.4, calculate_words: 0.28},
    Situation.FAILED: {
        ask_airline: 0.45,
        ask_refund: 0.15,
        ask_seat: 0.1,
        search_everywhere: 0.1,
        calculate_words: 0.1,
        guess: 0.1,
    },
    Situation.AIRLINE: {search_airline: 0.3, search_city: 0.3, ask_refund: 0.25, search_everywhere: 0.15},
    Situation.REFUND: {ask_airline: 0.85, search_everywhere: 0.15},
    Situation.NOTES: {search_airline: 0.42, search_city: 0.42, search_everywhere: 0.16},
    Situation.FARE: {ask_refund: 0.85, answer_fare: 0.15},
    Situation.FACTS: {subtract: 0.8, add: 0.2},
    Situation.RESULT: {answer: 0.44, answer_briefly: 0.44, guess: 0.12},
}
"""How often each choice is demonstrated in each situation."""

_FLAWLESS = {
    situation: {choice: share for choice, share in choices.items() if choice in RIGHT}
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

    def hear(self, call: Asks, output: str) -> None:
        self.calls += 1
        self.airline |= call.arguments == {"key": "airline"}
        self.refund |= call.arguments == {"key": "refund"}
        self.fare |= call.tool == "search" and output.startswith("fare")
        self.result |= call.tool == "calculator" and output.startswith("=")

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
    messages = opened(SYSTEM_PROMPT, task.question)
    known, output = Told(), ""
    for call in range(MOST_CALLS):
        reply = choose(known.situation)(task, output)
        if isinstance(reply, str):
            return [*messages, says(reply)]
        output = use(task, reply.tool, reply.text)
        known.hear(reply, output)
        messages += uses(reply.tool, reply.text, output, f"call_{call}")
    return messages[:-1]


RECIPE = Recipe(
    Demonstrations(conversation, TOOLS, lesson),
    Shape(vocabulary=480, hidden=64, layers=2, heads=2, kv_heads=2, initializer_range=0.125),
    steps=1000,
    batch=16,
    learning_rate=3e-3,
)
