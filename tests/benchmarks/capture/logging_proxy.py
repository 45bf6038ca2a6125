"""A logging proxy: it keeps what goes through it, and adds nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from .records import Response, Tool, as_json


@dataclass(frozen=True)
class Logged:
    """A request and its reply."""

    request: Mapping[str, Any]
    choices: Sequence[Mapping[str, Any]]
    """As messages: the pieces of a stream are put together."""


class LoggingProxy:
    """Stands before a model server, and logs its chat completions."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.log: list[Logged] = []
        self.url = ""

    async def __aenter__(self) -> LoggingProxy:
        self._client = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/{path:.*}", self._relay)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._client.close()

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        asked = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        headers["Accept-Encoding"] = "identity"
        async with self._client.post(f"{self._target}{request.path}", data=asked, headers=headers) as got:
            payload = await got.read()
        if got.status == 200 and request.path.endswith("/chat/completions"):
            self.log.append(Logged(json.loads(asked), _choices(payload, got.content_type)))
        return web.Response(body=payload, status=got.status, content_type=got.content_type)


def _choices(payload: bytes, content_type: str) -> list[dict[str, Any]]:
    if content_type != "text/event-stream":
        return [choice["message"] for choice in json.loads(payload)["choices"]]
    lines = (line.removeprefix("data: ") for line in payload.decode().splitlines() if line.startswith("data: {"))
    messages: dict[int, dict[str, Any]] = {}
    for piece in (choice for line in lines for choice in json.loads(line)["choices"]):
        message = messages.setdefault(piece["index"], {"content": "", "tool_calls": {}})
        message["content"] += piece["delta"].get("content") or ""
        for part in piece["delta"].get("tool_calls") or ():
            call = message["tool_calls"].setdefault(
                part["index"], {"id": "", "function": {"name": "", "arguments": ""}}
            )
            call["id"] += part.get("id") or ""
            for name in ("name", "arguments"):
                call["function"][name] += (part.get("function") or {}).get(name) or ""
    return [{**each, "tool_calls": list(each["tool_calls"].values())} for each in messages.values()]


def responses_of_log(log: Sequence[Logged]) -> Iterator[Response]:
    """Each reply, with the tool results that later requests show. No agent has a name, no tool result a status."""
    shown = {
        message["tool_call_id"] for logged in log for message in logged.request["messages"] if message["role"] == "tool"
    }
    for message in (message for logged in log for message in logged.choices):
        calls = message.get("tool_calls") or ()
        tools = [
            Tool(call["id"], call["function"]["name"], as_json(call["function"]["arguments"]), None)
            for call in calls
            if call["id"] in shown
        ]
        ids = tuple(call["id"] for call in calls)
        yield Response(None, message.get("content") or "", ids, None, None, None, tuple(tools))
