"""A model server without a model: deterministic, scripted, failing on demand.

It speaks OpenAI's completions, and chat completions in vLLM's shape, also streamed. `script` queues answers to the next
requests; the function `answer`, by default an echo, answers all others.

    async with ScriptedUpstream() as upstream:  # `with` for tests that block: it serves from a thread
        upstream.script(Fail(500), Say("hello"))
        ...  # the first request fails, the second gets "hello", later ones the default
        upstream.received[0].body["seed"]
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import ssl
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeAlias

from aiohttp import web
from anyio.from_thread import start_blocking_portal

from agl_core.testing.scripts import CallTools, Drop, Fail, Hold, Raw, Received, Say, Step, echo

END_TOKEN = 256
"""Tokens are the bytes of the text, then this one."""

Answer: TypeAlias = Callable[[Received], Step | Awaitable[Step]]

Reply: TypeAlias = dict[str, Any]


class ScriptedUpstream:
    """Listens on a free port of this machine; see the module for its use."""

    paths: tuple[str, ...] = ("chat/completions", "completions")

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.answer: Answer = echo
        """It may block, which holds up its own request alone."""
        self.returns_ids = True
        self.streams = True
        self.cut = 0
        """Streams whose client left before their end."""
        self.models = ["served"]
        self.more: Mapping[str, Any] = {}
        """Further or changed fields of each reply."""
        self.headers: dict[str, str] = {}
        self.root = ""
        self._script: deque[Step] = deque()
        self._serves = contextlib.AsyncExitStack()
        self._blocking = ThreadPoolExecutor(64)
        self._thread = contextlib.ExitStack()

    @property
    def url(self) -> str:
        """The base URL that OpenAI's clients take."""
        return f"{self.root}/v1"

    def script(self, *steps: Step) -> None:
        self._script.extend(steps)

    def agents(self) -> list[str | None]:
        return [request.agent for request in self.received]

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=64 << 20)
        for path in self.paths:
            app.router.add_post(f"/v1/{path}", self._complete)
        app.router.add_get("/v1/models", self._models)
        self.root = await self._serves.enter_async_context(served(app))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._serves.aclose()
        self._blocking.shutdown(wait=False)

    def __enter__(self) -> Self:
        portal = self._thread.enter_context(start_blocking_portal())
        self._thread.enter_context(portal.wrap_async_context_manager(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.close()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        received = Received(json.loads(await request.read()), request.headers, request.path)
        self.received.append(received)
        number = len(self.received)
        step = self._script.popleft() if self._script else await self._answered(received)
        streamed = self.streams and bool(received.body.get("stream"))
        if isinstance(step, Hold) and not (step.after and streamed):
            step.arrived.set()
            await step.release.wait()
            step = step.then
        match step:
            case Drop(after=0):
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            case Fail(status, content, after=0):
                return web.json_response(content, status=status)
            case Raw(payload) if not (streamed and b'"message"' in payload):
                return web.Response(body=payload, content_type="application/json", headers=self.headers)
        if streamed:
            return await self._stream(request, received, step, number)
        completion = self._completion(received, step, number)
        text = self.encode(received, completion, streamed=False)
        return web.Response(text=text, content_type="application/json", headers=self.headers)

    async def _stream(self, request: web.Request, received: Received, step: Step, number: int) -> web.StreamResponse:
        completion = self._completion(received, step, number)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **self.headers})
        await response.prepare(request)
        events = self.encode(received, completion, streamed=True).split("\n\n")[:-1]
        with contextlib.suppress(ConnectionError):
            for place, event in enumerate(events):
                match step:
                    case Hold(after=after) if after == place:
                        step.arrived.set()
                        await step.release.wait()
                    case Drop(after=after) if after == place:
                        assert request.transport is not None
                        request.transport.close()
                    case Fail(_, content, after=after) if after == place:
                        await response.write(f"data: {json.dumps(content)}\n\n".encode())
                        return response
                await response.write(f"{event}\n\n".encode())
                await asyncio.sleep(0)
            return response
        self.cut += 1
        return response

    def encode(self, received: Received, completion: Reply, streamed: bool) -> str:
        """A chat completion as the body of a reply in the API that was asked."""
        if "messages" not in received.body:
            completion["choices"] = [{**item, "text": item["message"]["content"]} for item in completion["choices"]]
        with_usage = bool((received.body.get("stream_options") or {}).get("include_usage"))
        return events_of(completion, with_usage=with_usage) if streamed else json.dumps(completion)

    async def _answered(self, received: Received) -> Step:
        try:
            answered = await asyncio.get_running_loop().run_in_executor(self._blocking, self.answer, received)
            return await answered if inspect.isawaitable(answered) else answered
        except Exception as error:
            return Fail(500, {"error": {"message": repr(error)}})

    def _completion(self, received: Received, step: Step, number: int) -> Reply:
        body = received.body
        step = step.then if isinstance(step, Hold) else step
        if isinstance(step, Raw):
            return dict(json.loads(step.payload))
        if not isinstance(step, Say | CallTools):
            step = echo(received)
        prompt_ids = list(json.dumps(list(received.items)).encode())
        choices = [self._choice(body, step, index, number) for index in range(body.get("n") or 1)]
        produced = sum(len(choice["token_ids"]) for choice in choices)
        completion: Reply = {
            "id": f"chatcmpl-{number}",
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
            **self.more,
        }
        if not self.returns_ids:
            del completion["prompt_token_ids"]
            for choice in choices:
                del choice["token_ids"]
                choice["logprobs"] = None
        return completion

    def _choice(self, body: Mapping[str, Any], step: Say | CallTools, index: int, number: int) -> Reply:
        text, finish_reason, tool_calls = step.text, "stop", None
        if isinstance(step, CallTools):
            finish_reason = "tool_calls"
            seed = body.get("seed", number)
            tool_calls = [
                {
                    "id": given[0] if given else f"call_{zlib.crc32(json.dumps([seed, index, place]).encode()):08x}",
                    "type": "function",
                    "function": {"name": name, "arguments": _arguments(arguments)},
                }
                for place, (name, arguments, *given) in enumerate(step.calls)
            ]
        elif index:
            text = f"{text} ({index})"
        for stop in [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or ():
            text = text.split(stop)[0] if text else text
        sampled = text or json.dumps([call["function"] for call in tool_calls or ()])
        ids = [*sampled.encode(errors="replace"), END_TOKEN]
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
    """One token's entry in a choice's `logprobs`, with so many alternatives."""
    text = bytes([token]).decode("latin-1") if token < END_TOKEN else ""
    entry = {"token": text, "logprob": logprob(token), "bytes": list(text.encode())}
    return {**entry, "top_logprobs": [entry] * top}


def _arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def events_of(completion: Reply, *, with_usage: bool = True) -> str:
    """A chat completion as its stream, as an engine's server sends it.

    The first chunk has the prompt's ids, each other one ids and log-probabilities of some tokens, which come before
    their text; the one before the end has the usage and agl's extras.
    """
    of_whole = ("choices", "usage", "agl", "prompt_token_ids")
    head = {k: v for k, v in completion.items() if k not in of_whole} | {"object": "chat.completion.chunk"}
    chunks = []
    for place, choice in enumerate(completion["choices"]):
        deltas = [{"role": "assistant", "content": ""}, {}, *_deltas(choice["message"]), {}]
        ids, entries = choice.get("token_ids"), (choice.get("logprobs") or {}).get("content")
        size = -(-len(ids or entries or ()) // (len(deltas) - 1))
        for number, delta in enumerate(deltas):
            tokens = slice(max(0, number - 1) * size, number * size)
            piece: Reply = {"index": choice.get("index", place), "delta": delta}
            piece |= {"text": delta.get("content") or ""} if "text" in choice else {}
            piece |= {"token_ids": ids[tokens]} if ids is not None else {}
            piece["logprobs"] = {"content": entries[tokens]} if entries is not None and number else None
            chunks.append({**head, "choices": [piece]})
        whole = ("index", "message", "logprobs", "token_ids", "text")
        chunks[-1]["choices"][0].update({k: v for k, v in choice.items() if k not in whole})
    chunks[0] |= {k: completion[k] for k in ("prompt_token_ids",) if k in completion}
    last: Reply = {k: completion[k] for k in ("usage", "agl") if k in completion and (with_usage or k == "agl")}
    if last:
        chunks.append({**head, "choices": [], **last})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def _deltas(message: Mapping[str, Any]) -> Iterator[Reply]:
    """A message in pieces, its content behind the other texts."""
    for name in sorted(message.keys() - {"role", "tool_calls"}, key="content".__eq__):
        yield from ({name: piece} for piece in _pieces(message[name] or ()))
    for place, call in enumerate(message.get("tool_calls") or ()):
        kind, written = ("custom", "input") if call.get("type") == "custom" else ("function", "arguments")
        text = call[kind].get(written)
        first, *others = (_pieces(text) or [text]) if isinstance(text, str) else [text]
        yield {"tool_calls": [{**call, "index": place, kind: {**call[kind], written: first}}]}
        yield from ({"tool_calls": [{"index": place, kind: {written: other}}]} for other in others)


def _pieces(value: Any) -> list[Any]:
    size = max(8, len(value) // 32)
    return [value[start : start + size] for start in range(0, len(value), size)]


@contextlib.asynccontextmanager
async def served(app: web.Application, *, ssl_context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serve an application on a free port: its URL, without a slash at the end."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=ssl_context).start()
        yield f"http{'s' if ssl_context else ''}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
