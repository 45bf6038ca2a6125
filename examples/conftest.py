"""Helpers of the examples' tests: a scripted model behind the agents."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from agl_core.testing.scripts import CallTools, Received, Say
from agl_core.testing.upstream import ScriptedUpstream


class ScriptedModel:
    """Answers with scripted assistant messages, in order, and keeps what it was sent."""

    def __init__(self, upstream: ScriptedUpstream) -> None:
        self.replies: list[dict[str, Any] | str] = []
        """Assistant messages, or their texts; the last one is repeated."""
        self._received = upstream.received
        self._received.clear()
        upstream.answer = self._answer

    def clear(self) -> None:
        self._received.clear()

    @property
    def requests(self) -> list[Mapping[str, Any]]:
        return [received.body for received in self._received]

    @property
    def first_messages(self) -> list[str]:
        """The first message of each request: which agent asks."""
        return [request["messages"][0]["content"] for request in self.requests]

    def _answer(self, received: Received) -> Say | CallTools:
        message = self.replies[min(len(self._received), len(self.replies)) - 1]
        if isinstance(message, str):
            return Say(message)
        if tool_calls := message.get("tool_calls"):
            calls = [(call["function"]["name"], call["function"]["arguments"], call["id"]) for call in tool_calls]
            return CallTools(calls, message["content"])
        return Say(message["content"])


@pytest.fixture(scope="session")
def _endpoint() -> Iterator[ScriptedUpstream]:
    """One endpoint for the session: the agent, made once at import, keeps the address it saw then."""
    with ScriptedUpstream() as upstream:
        upstream.headers["Connection"] = "close"  # Each test has an event loop of its own, and connections end with it.
        os.environ["OPENAI_BASE_URL"] = upstream.url
        os.environ["OPENAI_API_KEY"] = "unused"
        yield upstream


@pytest.fixture
def model(_endpoint: ScriptedUpstream) -> ScriptedModel:
    return ScriptedModel(_endpoint)
