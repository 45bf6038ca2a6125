"""What a scripted model server gets and says: requests as they arrived, and the steps that answer them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agl_core.wire.headers import HEADER_AGENT, HEADER_ROLLOUT


@dataclass(frozen=True)
class Received:
    """One request as it arrived. Conversations are read alike from chat completions and from the Responses API."""

    body: Mapping[str, Any]
    headers: Mapping[str, str]
    """By name, in any case."""
    path: str = "/v1/chat/completions"

    @property
    def is_responses(self) -> bool:
        return self.path.endswith("/responses")

    @property
    def rollout(self) -> str | None:
        """Rollout and attempt that the request is stamped with."""
        return self.headers.get(HEADER_ROLLOUT)

    @property
    def agent(self) -> str | None:
        return self.headers.get(HEADER_AGENT)

    @property
    def items(self) -> Sequence[Mapping[str, Any]]:
        items: Any = self.body.get("input" if self.is_responses else "messages") or self.body.get("prompt") or []
        return [{"role": "user", "content": items}] if isinstance(items, str) else items

    @property
    def said(self) -> str:
        return str(next(item["content"] for item in reversed(self.items) if item.get("role") == "user"))

    @property
    def turns(self) -> int:
        """How often the model has answered in this conversation."""
        return sum(item.get("role") == "assistant" or item.get("type") == "function_call" for item in self.items)

    @property
    def instructions(self) -> str:
        if self.is_responses:
            return str(self.body.get("instructions"))
        return next((str(item["content"]) for item in self.items if item["role"] == "system"), "")


@dataclass(frozen=True)
class Say:
    """Answer with this text."""

    text: str


@dataclass(frozen=True)
class CallTools:
    """Answer with these tool calls: (name, arguments), or (name, arguments, id); else the id is drawn by the seed.

    Arguments that are text stand as they are, valid JSON or not.
    """

    calls: Sequence[tuple[str, Any] | tuple[str, Any, str]]
    text: str | None = None


@dataclass(frozen=True)
class Fail:
    """Answer with an error status."""

    status: int
    body: Any = field(default_factory=lambda: {"error": {"message": "scripted failure", "type": "x", "code": None}})


@dataclass(frozen=True)
class Raw:
    """Answer 200 with these bytes."""

    payload: bytes


@dataclass(frozen=True)
class Drop:
    """Close the connection without an answer."""


@dataclass
class Hold:
    """Answer with `then` once `release` is set; `arrived` says that the request is waiting."""

    then: Say | CallTools = field(default_factory=lambda: Say("held"))
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)


Step: TypeAlias = Say | CallTools | Fail | Raw | Drop | Hold

OVERFLOW = Fail(
    400,
    {
        "error": {
            "message": "This model's maximum context length is 64 tokens. However, you requested 90 tokens.",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        }
    },
)
"""vLLM's words for a prompt that is too long."""


def in_turn(*steps: Step) -> Callable[[Received], Step]:
    """The n-th request of each conversation gets the n-th step, and later ones the last.

    >>> answer = in_turn(CallTools([("add", {"a": 1, "b": 2})]), Say("3"))
    >>> answer(Received({"messages": [{"role": "user", "content": "1 + 2?"}]}, {}))
    CallTools(calls=[('add', {'a': 1, 'b': 2})], text=None)
    """
    return lambda received: steps[min(received.turns, len(steps) - 1)]


def by_agent(**answers: Callable[[Received], Step]) -> Callable[[Received], Step]:
    """Each agent, whose name is its system prompt, has answers of its own."""
    return lambda received: answers[received.instructions](received)


def fitting(received: Received) -> Say | CallTools:
    """What a helpful model would answer: forced or fitting tools, JSON where it is asked for, otherwise text."""
    body, last = received.body, received.items[-1]
    asked = _text(last.get("content"))
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or () if "function" in tool}
    choice = body.get("tool_choice") or "auto"
    if isinstance(choice, dict):
        tools = {name: tool for name, tool in tools.items() if name == choice["function"]["name"]}
    forced = choice == "required" or isinstance(choice, dict)
    if tools and (forced or (choice == "auto" and last["role"] == "user")):
        name, tool = next(iter(tools.items()))
        return CallTools([(name, example(tool.get("parameters") or {}, asked))])
    wanted = body.get("response_format") or {}
    if wanted.get("type") == "json_schema":
        return Say(json.dumps(example(wanted["json_schema"]["schema"], asked)))
    if wanted.get("type") == "json_object":
        return Say(json.dumps(dict.fromkeys(_quoted(asked), "something")))
    return Say(f"You said: {asked or 'nothing'}. I answer in more than eighty characters, so that it takes pieces.")


def example(schema: Mapping[str, Any], asked: str, root: Mapping[str, Any] | None = None) -> Any:
    """A value that fits a JSON schema; numbers and quoted words are taken from what was asked.

    >>> example({"type": "object", "properties": {"city": {"type": "string"}}}, "How is 'Bern'?")
    {'city': 'Bern'}
    """
    root = schema if root is None else root
    if "$ref" in schema:
        target: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return example(target, asked, root)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return example(schema[several][0], asked, root)
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "integer" | "number":
            numbers = re.findall(r"-?\d+", asked)
            return int(numbers[0]) if numbers else 1
        case "boolean":
            return True
        case "null":
            return None
        case "array":
            return [example(schema.get("items") or {}, asked, root)]
        case "object" | None if "properties" in schema or schema.get("type") == "object":
            properties = schema.get("properties") or {}
            return {name: example(each, asked, root) for name, each in properties.items()}
    return next(iter(_quoted(asked)), "something")


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']+)'", text)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(part.get("text", "") for part in content)
    return content or ""
