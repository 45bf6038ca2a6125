"""Episodes of an assistant that makes given choices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from behaviours import Choice, Message, behave
from trips import Trip

from agl_core.types import Ending, Episode, FinishReason, Mode, Task, Transition, TransitionKey


@pytest.fixture
def played() -> Callable[..., Episode]:
    """`played(traveller, trip, *choices)`: the episode of an assistant that does one thing after another."""

    def play(traveller: str, trip: Trip, *choices: Choice) -> Episode:
        todo = iter(choices)
        return episode(traveller, behave(trip, lambda _: next(todo)))

    return play


def episode(traveller: str, messages: list[Message]) -> Episode:
    """What would be recorded of a conversation."""
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    transitions = tuple(
        Transition(
            key=TransitionKey("r", 0, f"c{turn}", 0),
            agent=None,
            turn=turn,
            agent_turn=turn,
            policy="default",
            version=0,
            messages=tuple(messages[:place]),
            response=messages[place],
            finish_reason=FinishReason.STOP,
            temperature=1.0,
        )
        for turn, place in enumerate(turns)
    )
    task = Task("1", {"question": messages[1]["content"], "traveller": traveller})
    return Episode("r", 0, "g", 0, task, Mode.TRAIN, Ending.FINISHED, transitions)
