"""What the example's tests share: the assistant with a scripted model behind it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from behaviours import Choice, Message, behave
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from trips import Trip

from agl_core.types import Ending, Episode, FinishReason, Mode, Task, Transition, TransitionKey


@dataclass
class ScriptedModel:
    """Answers chat completions with scripted assistant messages and keeps what it was sent."""

    replies: list[dict[str, Any]] = field(default_factory=list)
    """In order; the last one is repeated."""
    requests: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(json.loads(request.content))
        message = {"role": "assistant", **self.replies[min(len(self.requests), len(self.replies)) - 1]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return httpx2.Response(
            200, json={"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        )


@pytest.fixture
def model() -> ScriptedModel:
    """The model behind the assistant, to be given replies."""
    return ScriptedModel()


@pytest.fixture
def help_traveller(model: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[str]]:
    """The assistant's entry, with a real client on a transport that asks the scripted model."""
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    import assistant

    transport = DefaultAsyncHttpxClient(transport=httpx2.MockTransport(model.answer))
    monkeypatch.setattr(assistant, "client", AsyncOpenAI(base_url="http://model/v1", http_client=transport))
    return assistant.help_traveller


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
