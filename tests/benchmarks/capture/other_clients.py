"""An agent written from scratch around an HTTP library that is not httpx."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import requests
import urllib3
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agl_core.testing.adapters.driver import (
    CHAT,
    MESSAGES,
    RESPONSES,
    Driver,
    Gap,
    Program,
    Question,
    Scenario,
    Setting,
)

from ...conformance.drivers.by_hand import Functions
from ...conformance.drivers.handmade import Loop

Post = Callable[[str, bytes, dict[str, str]], tuple[int, bytes]]


def by_requests(url: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """`requests`."""
    reply = requests.post(url, data=body, headers=headers, timeout=60)
    return reply.status_code, reply.content


def by_urllib3(url: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """`urllib3`."""
    with urllib3.PoolManager(headers=headers) as pool:
        reply = pool.request("POST", url, body=body, retries=False)
        return reply.status, reply.data


def by_urllib(url: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """The standard library."""
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as reply:
        return reply.status, reply.read()


async def by_aiohttp(url: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """`aiohttp`."""
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, data=body) as reply:
        return reply.status, await reply.read()


BLOCKING: dict[str, Post] = {"requests": by_requests, "urllib3": by_urllib3, "urllib": by_urllib}
AIOHTTP = "aiohttp"


class OtherClients(Driver):
    """A loop around requests, urllib3 and urllib in threads, and around aiohttp, with `agl_core.capture.identify`."""

    name = "no framework, HTTP clients other than httpx (agl-core)"
    packages = ("requests", "urllib3", "aiohttp")
    apis = (CHAT,)
    without = {RESPONSES: "It is the same client.", MESSAGES: "It is the same client."}  # noqa: RUF012
    forms = (*BLOCKING, AIOHTTP)
    gaps = (Gap("lost replies, retried", "These libraries do not say that a request is a retry: it is another call."),)

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        create = _Completions(setting).create
        client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
        loop = Loop(Functions(), client, setting, scenario)

        async def program(question: Question) -> None:
            await loop.run(question.text)

        return program


class _Completions:
    """As much of OpenAI's client as the conversations use."""

    def __init__(self, setting: Setting) -> None:
        self._url, self._retries = f"{setting.base_url}/chat/completions", setting.retries
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {setting.api_key}"}
        self._form = setting.form

    async def create(self, *, extra_headers: dict[str, str], **body: Any) -> Any:
        """A completion, or its pieces."""
        payload, headers = json.dumps(body).encode(), {**self._headers, **extra_headers}
        for left in reversed(range(self._retries + 1)):
            try:
                status, reply = await self._post(payload, headers)
            except (OSError, requests.RequestException, urllib3.exceptions.HTTPError, aiohttp.ClientError):
                status, reply = 0, b""
            if status == 200:
                break
            if not left:
                raise ConnectionError(f"status {status}: {reply.decode()[:200]}")
        return _pieces(reply) if body["stream"] else ChatCompletion.model_validate_json(reply)

    async def _post(self, payload: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        if self._form == AIOHTTP:
            return await by_aiohttp(self._url, payload, headers)
        return await asyncio.to_thread(BLOCKING.get(self._form, by_requests), self._url, payload, headers)


async def _pieces(stream: bytes) -> AsyncIterator[ChatCompletionChunk]:
    for line in stream.decode().splitlines():
        if line.startswith("data: {"):
            yield ChatCompletionChunk.model_validate_json(line.removeprefix("data: "))
