"""Small requests, requests as no client sends them, an upstream's refusal, and what agl logged."""

from __future__ import annotations

import logging
import re
from typing import Any

import httpx
import pytest

from agl_core.server import RolloutQueue
from agl_core.testing.scripts import Fail
from agl_core.testing.server import Stack
from agl_core.types import AttemptKey, Ending, Episode
from agl_core.wire import CloseRequest
from agl_core.worker.agent import PLACEHOLDER_KEY

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GOOD: dict[str, Any] = {"model": "default", "messages": HELLO}
SMALLEST: dict[str, dict[str, Any]] = {
    "chat/completions": GOOD,
    "completions": {"model": "default", "prompt": "hello"},
    "responses": {"model": "default", "input": "hello"},
    "messages": {**GOOD, "max_tokens": 9},
}
"""A request of each API, by its route."""
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


def key_of_url(stack: Stack, url: str) -> str:
    """The agent's key of the attempt that a URL names; one that is good for nothing if it names none."""
    named = re.search(r"/rollout/([^/]+)/attempt/(\d+)/", url)
    return stack.key(AttemptKey(named[1], int(named[2]))) if named else PLACEHOLDER_KEY


async def post(stack: Stack, url: str, content: bytes, **headers: str) -> httpx.Response:
    """POST these very bytes with the key of the attempt that the URL names."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        return await client.post(
            url, content=content, headers={"Authorization": f"Bearer {key_of_url(stack, url)}", **headers}
        )


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
