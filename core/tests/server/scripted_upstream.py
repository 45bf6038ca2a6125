"""A model server without a model: OpenAI's chat completions in vLLM's shape, deterministic, failing on demand.

By default it answers sensibly to what it is asked (text, a call of the tool it was given, JSON of a schema).
`script(...)` queues steps that answer the next requests instead.

    async with ScriptedUpstream() as upstream:
        upstream.script(Fail(500), Say("hello"))
        ...  # the first request fails, the second gets "hello", later ones the default
        upstream.received[0].body["seed"]
"""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

END_TOKEN = 256
"""Tokens are the bytes of the text, then this one."""


@dataclass(frozen=True)
class Received:
    """One request as it arrived."""

    body: Mapping[str, Any]
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Say:
    """Answer with this text."""

    text: str


@dataclass(frozen=True)
class CallTools:
    """Answer with these tool calls: (name, arguments)."""

    calls: Sequence[tuple[str, Mapping[str, Any]]]
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


Step = Say | CallTools | Fail | Raw | Drop | Hold

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


class ScriptedUpstream:
    """Listens on a free port. `agl` is merged into each reply's top level as agl's own engine does;
    `returns_ids = False` leaves ids and log-probabilities out; `headers` go onto each reply."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.returns_ids = True
        self.models = ["served"]
        self.agl: dict[str, Any] | None = None
        self.headers: dict[str, str] = {}
        self.url = ""
        self._script: deque[Step] = deque()
        self._runner: web.AppRunner | None = None

    def script(self, *steps: Step) -> None:
        """Answer the next requests with these steps."""
        self._script.extend(steps)

    async def __aenter__(self) -> ScriptedUpstream:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.received.append(Received(body, dict(request.headers)))
        step: Step = self._script.popleft() if self._script else default_step(body)
        if isinstance(step, Hold):
            step.arrived.set()
            await step.release.wait()
            step = step.then
        match step:
            case Drop():
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            case Fail(status, content):
                return web.json_response(content, status=status)
            case Raw(payload):
                return web.Response(body=payload, content_type="application/json", headers=self.headers)
        return web.json_response(self._completion(body, step), headers=self.headers)

    def _completion(self, body: Mapping[str, Any], step: Say | CallTools) -> dict[str, Any]:
        prompt_ids = list(json.dumps(body["messages"]).encode())
        choices = [self._choice(body, step, index) for index in range(body.get("n") or 1)]
        produced = sum(len(choice["token_ids"]) for choice in choices)
        completion: dict[str, Any] = {
            "id": "chatcmpl-of-upstream",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": body["model"],
            "choices": choices,
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": produced,
                "total_tokens": len(prompt_ids) + produced,
            },
            "prompt_token_ids": prompt_ids,
            "kv_transfer_params": None,
        }
        if self.agl is not None:
            completion["agl"] = self.agl
        if not self.returns_ids:
            del completion["prompt_token_ids"]
            for choice in choices:
                del choice["token_ids"]
                choice["logprobs"] = None
        return completion

    def _choice(self, body: Mapping[str, Any], step: Say | CallTools, index: int) -> dict[str, Any]:
        text, finish_reason, tool_calls = step.text, "stop", None
        if isinstance(step, CallTools):
            finish_reason = "tool_calls"
            seed = body.get("seed", len(self.received))
            tool_calls = [
                {
                    "id": f"call_{zlib.crc32(json.dumps([seed, index, place]).encode()):08x}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
                }
                for place, (name, arguments) in enumerate(step.calls)
            ]
        elif index:
            text = f"{text} ({index})"
        for stop in [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or ():
            text = text.split(stop)[0] if text else text
        sampled = text or json.dumps([call["function"] for call in tool_calls or ()])
        ids = [*sampled.encode(), END_TOKEN]
        limit = body.get("max_tokens") or len(ids)
        if len(ids) > limit:
            ids, finish_reason = ids[:limit], "length"
            text = bytes(ids).decode("utf-8", "ignore") if tool_calls is None else text
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "tool_calls": tool_calls, "reasoning_content": None},
            "logprobs": {"content": [logprob_entry(token, body.get("top_logprobs") or 0) for token in ids]},
            "finish_reason": finish_reason,
            "stop_reason": None,
            "token_ids": ids,
        }


def logprob(token: int) -> float:
    """The log-probability that this server gives a token."""
    return -(1 + token % 7) / 8


def logprob_entry(token: int, top: int) -> dict[str, Any]:
    text = bytes([token]).decode("latin-1") if token < END_TOKEN else ""
    entry = {"token": text, "logprob": logprob(token), "bytes": list(text.encode())}
    return {**entry, "top_logprobs": [entry] * top}


def default_step(body: Mapping[str, Any]) -> Say | CallTools:
    """What a helpful model would answer: forced or fitting tools, JSON where it is asked for, otherwise text."""
    last = body["messages"][-1]
    asked = _text(last.get("content"))
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
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
    """A value that fits a JSON schema; numbers and quoted words are taken from what was asked."""
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
