"""The script of a model server: requests as they arrived, and the steps that answer them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agl_core.capture.requests import HEADER_AGENT


@dataclass(frozen=True)
class Received:
    """One request as it arrived."""

    body: Mapping[str, Any]
    headers: Mapping[str, str]
    """By name, in any case."""
    path: str = "/v1/chat/completions"

    @property
    def agent(self) -> str | None:
        return self.headers.get(HEADER_AGENT)

    @property
    def items(self) -> Sequence[Mapping[str, Any]]:
        items: Any = self.body.get("messages") or self.body.get("input") or self.body.get("prompt") or []
        return [{"role": "user", "content": items}] if isinstance(items, str) else items

    @property
    def said(self) -> str:
        return str(next(item["content"] for item in reversed(self.items) if item.get("role") == "user"))

    @property
    def turns(self) -> int:
        """How often the model has answered in this conversation."""
        return sum(item.get("role") == "assistant" or item.get("type") == "function_call" for item in self.items)


@dataclass(frozen=True)
class Say:
    """Answer with this text."""

    text: str


@dataclass(frozen=True)
class CallTools:
    """Answer with these tool calls; an id is by default drawn by the seed. Arguments that are text stay as they are."""

    calls: Sequence[tuple[str, Any] | tuple[str, Any, str]]
    text: str | None = None


@dataclass(frozen=True)
class Fail:
    """Answer with an error status, or end a stream by such an error `after` some chunks."""

    status: int
    body: Any = field(default_factory=lambda: {"error": {"message": "scripted failure", "type": "x", "code": None}})
    after: int = 0


@dataclass(frozen=True)
class Raw:
    """Answer 200 with these bytes; a chat completion is streamed where that is asked for."""

    payload: bytes


@dataclass(frozen=True)
class Drop:
    """Close the connection without an answer, or `after` some chunks of a stream."""

    after: int = 0


@dataclass
class Hold:
    """Answer with `then`, or go on with its stream `after` some chunks, once `release` is set; `arrived`: it waits."""

    then: Say | CallTools | Raw = field(default_factory=lambda: Say("held"))
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    after: int = 0


Step: TypeAlias = Say | CallTools | Fail | Raw | Drop | Hold


def in_turn(*steps: Step) -> Callable[[Received], Step]:
    """The n-th request of each conversation gets the n-th step, and later ones the last.

    >>> answer = in_turn(CallTools([("add", {"a": 1, "b": 2})]), Say("3"))
    >>> answer(Received({"messages": [{"role": "user", "content": "1 + 2?"}]}, {}))
    CallTools(calls=[('add', {'a': 1, 'b': 2})], text=None)
    """
    return lambda received: steps[min(received.turns, len(steps) - 1)]


def echo(received: Received) -> Say:
    """A reply for tests that do not care."""
    content = received.items[-1].get("content") or ""
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    text = " ".join(texts) or "nothing"
    return Say(f"You said: {text}. I answer in more than eighty characters, so that it takes pieces.")
