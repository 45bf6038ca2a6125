"""A logging proxy: it keeps what goes through it, and adds nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from agl_core.testing.http import Relay

from .records import Response, Tool, as_json


@dataclass(frozen=True)
class Logged:
    """A request and its reply."""

    request: Mapping[str, Any]
    choices: Sequence[Mapping[str, Any]]
    """As messages: the pieces of a stream are put together."""


class LoggingProxy(Relay):
    """Stands before a model server, and logs its chat completions."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.log: list[Logged] = []

    async def relay(self, request: web.Request) -> web.StreamResponse:
        passed = await self.pass_on(request, **{"Accept-Encoding": "identity"})
        response = passed.response()
        if passed.status == 200 and request.path.endswith("/chat/completions"):
            self.log.append(Logged(json.loads(passed.asked), _choices(passed.reply, response.content_type)))
        return response


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
