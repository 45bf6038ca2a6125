"""For tests of the server: small requests, replies that are hard to translate, a strict look at what an SDK parsed, and
an event loop's time that a test can put forward."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from agl_core.testing.scripts import Fail, Raw
from agl_core.testing.upstream import END_TOKEN, logprob_entry
from agl_core.types import AttemptKey, Ending, Episode
from agl_core.wire import CloseRequest
from agl_server.queue import RolloutQueue
from agl_server.testing import Stack

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GOOD: dict[str, Any] = {"model": "default", "messages": HELLO}
SMALLEST: dict[str, dict[str, Any]] = {
    "chat/completions": GOOD,
    "completions": {"model": "default", "prompt": "hello"},
    "responses": {"model": "default", "input": "hello"},
    "messages": {**GOOD, "max_tokens": 9},
}
"""A request of each API, by its route."""
TOO_LONG = "This model's maximum context length is 64 tokens. However, you requested 90 tokens."
OVERFLOW = Fail(400, {"error": {"message": TOO_LONG, "type": "BadRequestError", "param": None, "code": 400}})
"""vLLM's words for a prompt that is too long."""


async def post(
    stack: Stack, key: AttemptKey, body: Any = GOOD, route: str = "chat/completions", **headers: str
) -> httpx.Response:
    """POST a body, or these very bytes, with the attempt's key."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {stack.key(key)}", **headers}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        return await client.post(f"{stack.url(key)}/{route}", content=content, headers=headers)


def log_of_agl(caplog: pytest.LogCaptureFixture) -> str:
    """The log of agl alone, with tracebacks: clients of earlier tests may warn while they are collected."""
    formatter = logging.Formatter()
    return "\n".join(formatter.format(record) for record in caplog.records if record.name.startswith("agl_"))


def open_attempt(queue: RolloutQueue, key: AttemptKey) -> Any:
    """An attempt as the server keeps it while it runs."""
    attempt = queue.attempts.get(key)
    assert attempt is not None
    return attempt


async def closed(stack: Stack, key: AttemptKey) -> Episode:
    """The episode of an attempt, which is closed as finished."""
    await stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.FINISHED))
    return await stack.episode(key)


def clients_waiting(stack: Stack, key: AttemptKey) -> int:
    """The most connections that asked for one and the same call of an attempt."""
    attempt = open_attempt(stack.server.queue, key)
    exchanges = [exchange for same in attempt.answered._exchanges.values() for exchange in same]
    return max((len(exchange.waiting) for exchange in exchanges), default=0)


# For the tests of all APIs.


def call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: str | None, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The message of a reply."""
    return {"role": "assistant", "content": content, **more, **({"tool_calls": [*calls]} if calls else {})}


ADD = call("c1", "add", '{"a": 1}')
OWN = {
    "text": assistant("  Grüezi \n\n"),
    "empty": assistant(""),
    "one call": assistant(None, call("c1", "add", '{"a": 1, "b": 2}')),
    "empty text beside a call": assistant("", call("c1", "add", "{}")),
    "text and parallel calls": assistant("I add.", ADD, {**ADD, "id": "c2"}, call("c3", "sub", "{}")),
    "spacing, order, escapes, floats": assistant(
        None, call("c1", "f", '{ "z":1.0,\n"a" : [1e2, "\\u00e9", null, true] , "b":{}}')
    ),
    "half a surrogate": assistant(None, call("c1", "f", r'{"a": "\ud83c"}')),
    "arguments that are no JSON": assistant(None, call("c1", "f", '{"city": ')),
    "arguments that are no object": assistant(None, call("c1", "f", "[1]")),
    "deep arguments": assistant(None, call("c1", "f", '{"a":' + "[" * 300 + "]" * 300 + "}")),
    "reasoning alone": assistant(None, reasoning_content="I need not answer."),
    "reasoning": assistant("4", reasoning_content="2 + 2 is"),
    "reasoning of a newer vLLM, before a call": assistant(None, call("c1", "f", "{}"), reasoning="a tool"),
}
"""Messages of upstreams, as the next request of a chat would repeat them."""


def reply(message: dict[str, Any], finish_reason: str | None = None, **choice: Any) -> Raw:
    """An upstream's reply with this message, in vLLM's shape; ids are the bytes of the content."""
    ids = [*(message.get("content") or "").encode(), END_TOKEN]
    ended = finish_reason or ("tool_calls" if message.get("tool_calls") else "stop")
    of_engine = {"mask": [False, *[True] * (len(ids) - 1)], "parse_error": "no closing brace"}
    body = {
        "id": "x",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"refusal": None, "tool_calls": [], **message},
                "finish_reason": ended,
                "logprobs": {"content": [logprob_entry(token, 0) for token in ids]},
                "token_ids": ids,
                **choice,
            }
        ],
        "prompt_token_ids": [1, 2, 3],
        "usage": {
            "prompt_tokens": 30,
            "completion_tokens": len(ids),
            "total_tokens": 30 + len(ids),
            "prompt_tokens_details": {"cached_tokens": 10},
        },
        "agl": {"version": 3, "prefilled": 1, "reused": 2, "prefix_broken": "edited", "choices": [of_engine]},
    }
    return Raw(json.dumps(body).encode())


def extras(value: Any, path: str = "") -> Iterator[str]:
    """The paths of all fields that the SDK's models do not have."""
    if isinstance(value, BaseModel):
        yield from (f"{path}.{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from extras(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from extras(item, f"{path}[{index}]")


def events_of(stream: str) -> list[dict[str, Any]]:
    """The events of a stream; each is named as its type says."""
    events = []
    for block in stream.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def chunks_of(stream: str) -> list[dict[str, Any]]:
    """The chunks of a stream of completions."""
    *chunks, done = stream.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def forwarded(stack: Stack) -> list[dict[str, Any]]:
    """The messages of the last request that the upstream got."""
    messages: list[dict[str, Any]] = stack.upstream.received[-1].body["messages"]
    return messages


def client_of(stack: Stack, key: AttemptKey, **options: Any) -> anthropic.AsyncAnthropic:
    """The client with the attempt's base URL, which ends before /v1 here."""
    base_url = stack.url(key).removesuffix("/v1")
    return anthropic.AsyncAnthropic(**{"base_url": base_url, "api_key": stack.key(key), "max_retries": 0, **options})


# Time.


class Clock:
    """`advance` makes everything due that waits on the loop for less than that, and lets it happen.

    By itself the time stands still, however long anything takes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._now = loop.time()
        loop.time = lambda: self._now  # type: ignore[method-assign]

    async def advance(self, seconds: float) -> None:
        """Put the time forward second by second, and a bit more, since whoever looks at regular times looks later."""
        for step in (*[1.0] * int(seconds), seconds % 1 + 0.2):
            self._now += step
            for _ in range(20):
                await asyncio.sleep(0)
