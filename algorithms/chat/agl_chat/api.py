"""The OpenAI-compatible API of an engine: chat requests in, token requests to its back end, replies out.

A reply comes whole (`ModelServer.finish`), or in chunks as its tokens come (`stream_reply`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse
from starlette.routing import Route

from agl_chat.backends import Backend, Generation, Request, SampledToken
from agl_chat.conversation import ChatText, Prompt, ReplyMemory, overflow
from agl_chat.parsing import Message, ParsedReply, ReplyParser, ResponseText, ToolFormat
from agl_chat.requests import ChatRequest, fold, normalise, parse_request
from agl_core.apis.dialect import unsupported, wrong
from agl_core.apis.errors import ENGINE_FAILED, ApiError, openai_problem
from agl_core.capture.requests import HEADER_IGNORED, HEADER_MOVED, HEADER_POLICY, HEADER_ROLLOUT
from agl_core.errors import AglError, nearest
from agl_core.types import FinishReason
from agl_server.http.listening import bind, error_response, json_response, unless_gone, url_of

Result = TypeVar("Result")
CHAT_COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/models"
PROMPT_TIMEOUT = 30.0
"""Seconds in which a conversation has to be rendered and tokenised."""
_SHORT = 1 << 16
"""Bytes of a request that takes milliseconds: longer ones are worked on by another thread than the server's."""
_LONGEST_NOTE = 1000
"""Characters."""
_FOR_TEMPLATES = ("reasoning_effort",)
"""Fields of a request that some templates have a variable for."""


def create_app(models: Mapping[str, ModelServer], backend: Backend, *, api_key: str) -> Starlette:
    """`POST /v1/chat/completions` for these models, by the name that clients ask for, and `GET /v1/models`.

    Every request needs `Authorization: Bearer <api_key>`. The header `x-agl-rollout` names the session whose earlier
    replies are recognised when they are echoed, and `x-agl-moved` says that other servers gave some of them.
    """

    def check_key(request: HttpRequest) -> None:
        sent = request.headers.get("authorization", "")
        if not hmac.compare_digest(sent.encode(), f"Bearer {api_key}".encode()):
            message = "Wrong API key: send 'Authorization: Bearer <key>' with the key of this run's engine."
            raise ApiError(401, message, type="authentication_error", code="invalid_api_key")

    async def list_models(request: HttpRequest) -> HttpResponse:
        check_key(request)
        listed = [{"id": name, "object": "model", "owned_by": "agl"} for name in models]
        return json_response({"object": "list", "data": listed})

    async def chat_completions(request: HttpRequest) -> HttpResponse:
        check_key(request)
        body = await request.body()
        chat = await _in_time(lambda: parse_request(body), len(body))
        model = models.get(chat.model)
        if model is None:
            message = f"There is no model {chat.model!r}. {nearest(chat.model, models)}"
            raise ApiError(404, message, type="not_found_error", param="model", code="model_not_found")
        session, moved = request.headers.get(HEADER_ROLLOUT), HEADER_MOVED in request.headers
        exchange = await _in_time(lambda: model.begin(chat, session, moved=moved), len(body))
        headers = {}
        if exchange.ignored:
            # A name may be anything, and a header may not.
            headers[HEADER_IGNORED] = quote(", ".join(exchange.ignored), safe=", ")[:_LONGEST_NOTE]
        if chat.stream:
            chunks = stream_reply(model, exchange, backend)
            first = await unless_gone(request, anext(chunks))  # Until then an error has a status of its own.
            return StreamingResponse(_events(first, chunks), 200, headers, media_type="text/event-stream")
        generated = await unless_gone(request, backend.generate(exchange.request))
        headers[HEADER_POLICY] = str(generated.version)
        return json_response(model.finish(exchange, generated), 200, headers)

    async def refuse(request: HttpRequest, error: Exception) -> HttpResponse:
        return error_response(_api_error(error))

    routes = [Route(CHAT_COMPLETIONS, chat_completions, methods=["POST"]), Route(MODELS, list_models)]
    errors = AglError, RecursionError, ClientDisconnect, Exception  # Starlette logs a traceback of the last alone.
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, refuse))


def serve_in_thread(app: Starlette, lost: Callable[[str], object]) -> str:
    """Serve on a free port of this machine; returns the base URL. `lost` gets the reason if the server ends."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
    listener = bind("127.0.0.1", 0)

    def serve() -> None:
        try:
            asyncio.run(server.serve(sockets=[listener]))
        finally:
            lost("The engine's HTTP server ended.")

    threading.Thread(target=serve, name="agl-http", daemon=True).start()
    return f"{url_of(*listener.getsockname())}/v1"


async def _in_time(work: Callable[[], Result], size: int) -> Result:
    """The result of work on a request of so many bytes. ApiError if it takes too long."""
    if size <= _SHORT:
        return work()
    try:
        async with asyncio.timeout(PROMPT_TIMEOUT):
            return await asyncio.to_thread(work)
    except TimeoutError:
        message = f"The prompt was not made within {PROMPT_TIMEOUT:g} s: send a shorter one, or try again."
        raise ApiError(503, message, type="server_error", code="timeout", retry_after=1) from None


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, RecursionError):
        return ApiError(400, "The request is nested too deeply.", code="invalid_value")
    words = str(error) if isinstance(error, AglError) else f"{type(error).__name__}: {error}"
    return error if isinstance(error, ApiError) else _engine_error(words)


def _engine_error(message: str, code: str = ENGINE_FAILED) -> ApiError:
    return ApiError(500, message, type="server_error", code=code)


async def _events(first: Mapping[str, Any], chunks: AsyncGenerator[Mapping[str, Any]]) -> AsyncIterator[bytes]:
    """Chunks as server-sent events; an error ends them."""
    async with contextlib.aclosing(chunks):
        yield _event(first)
        try:
            async for chunk in chunks:
                yield _event(chunk)
            yield b"data: [DONE]\n\n"
        except AglError as error:
            yield _event(openai_problem(_api_error(error)))


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


@dataclass(frozen=True, slots=True, eq=False)
class PendingReply:
    """A chat request on its way through the sampler."""

    chat: ChatRequest
    session: str | None
    messages: list[Message]
    prompt: Prompt
    request: Request
    parser: ReplyParser
    """Takes the text of each choice apart."""
    ignored: tuple[str, ...]


class ModelServer:
    """A model as a chat API sees it, used from one thread; clients and the back end know it by `name`."""

    def __init__(self, name: str, text: ChatText, context_length: int) -> None:
        self.name, self.text = name, text
        self._context_length = context_length
        self._sessions = ReplyMemory(self.text)

    def begin(self, chat: ChatRequest, session: str | None, *, moved: bool = False) -> PendingReply:
        """Make a sampling request of a chat request. Raises ApiError if it cannot be answered."""
        tool_format = self._tool_format(chat)
        if len(chat.messages) > self._context_length:  # Each has a token at least.
            raise overflow(f"are {len(chat.messages)}, and this model has a context of {self._context_length} tokens")
        messages, ignored = normalise(chat.messages), chat.unknown
        known = {name: ignored.pop(name) for name in _FOR_TEMPLATES if name in ignored and name in self.text.template}
        variables = chat.chat_template_kwargs or {}
        if reserved := self.text.reserved & variables.keys():
            problem = f"sets {', '.join(sorted(reserved))}, which is no variable of a template. Leave it out"
            raise unsupported("chat_template_kwargs", problem)
        prompt = self._sessions.prompt(
            session,
            messages,
            tools=chat.shown_tools,
            options=known | variables,
            moved=moved,
            limit=self._context_length,
        )
        length, context = len(prompt.ids), self._context_length
        if length + 1 > context:
            raise overflow(f"alone are {length} tokens of this model's {context}")
        stops = (*chat.stops, *_one_call_end(chat, tool_format))
        forced = ""
        if chat.forces_tool:
            forced = self.text.forced_prefix(chat.forced_tool, is_thinking=prompt.is_thinking)
        request = Request(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            prompt_ids=prompt.ids,
            max_tokens=min(chat.limit or context, context - length),
            n=chat.n or 1,
            temperature=1.0 if chat.temperature is None else chat.temperature,
            top_p=1.0 if chat.top_p is None else chat.top_p,
            seed=secrets.randbits(63) if chat.seed is None else chat.seed,
            forced_ids=tuple(self.text.encode(forced)),
            top=(chat.top_logprobs or 0) if chat.logprobs else 0,
            stop=stop_at(self.text, stops),
            stops=stops,
            grammar=chat.grammar,
            distortions=chat.distortions,
            model=self.name,
        )
        _, folded = fold(messages, self.text.roles)
        ignored |= {f"messages.{place}.role": messages[place]["role"] for place in folded}
        parser = self.text.parser(chat.shown_tools, is_thinking=prompt.is_thinking)
        return PendingReply(chat, session, messages, prompt, request, parser, tuple(ignored))

    def _tool_format(self, chat: ChatRequest) -> ToolFormat | None:
        if not chat.shown_tools:
            return None
        if self.text.tool_format is None or not self.text.takes_tools:
            problem = f"cannot be offered to {self.name!r}: its chat template writes calls in no format known here"
            raise wrong("tools", f"{problem} (see agl_chat.formats)", code="tools_not_supported")
        return self.text.tool_format

    def response_text(self, exchange: PendingReply) -> ResponseText:
        return ResponseText(self.text.decode, exchange.parser, exchange.chat.stops)

    def finish(
        self, exchange: PendingReply, generated: Generation, texts: Sequence[ResponseText] | None = None
    ) -> dict[str, Any]:
        """The reply's body; the session remembers one with token ids. `texts` are those of streamed responses."""
        if texts is None:
            texts = [self.response_text(exchange) for _ in generated.responses]
            for text, response in zip(texts, generated.responses, strict=True):
                text.feed(response.ids.tolist())
                text.end()
        choices, extras, replies = [], [], []
        for index, (response, text) in enumerate(zip(generated.responses, texts, strict=True)):
            if not np.isfinite(response.logprobs).all():
                problem = f"The model's output is not finite (policy version {generated.version})"
                raise _engine_error(f"{problem}: training has diverged.", code="non_finite")
            message, reason = _message(text.parsed, exchange, index), response.finish_reason
            if "tool_calls" in message and reason is FinishReason.STOP:
                reason = FinishReason.TOOL_CALLS
            ends = {"finish_reason": reason.value, "stop_reason": text.stop}
            choices.append({"index": index, "message": message, **ends, **self.of_tokens(exchange, response.tokens)})
            mask = [token.is_free for token in response.tokens]
            extras.append({"mask": None if all(mask) else mask, "parse_error": text.parsed.error})
            replies.append((normalise([message])[0], response.ids))
        if exchange.session is not None and exchange.chat.return_token_ids:
            self._sessions.record(exchange.session, exchange.messages, exchange.prompt, replies)
        prompt, completion = len(exchange.prompt.ids), sum(len(r.tokens) for r in generated.responses)
        body = {
            **self.head(exchange),
            "object": "chat.completion",
            "choices": choices,
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": min(prompt, generated.reused)},
            },
        }
        if exchange.chat.return_token_ids:
            body["prompt_token_ids"] = exchange.prompt.ids.tolist()
            body["agl"] = {
                "version": generated.version,
                "prefilled": generated.prefilled,
                "reused": generated.reused,
                "prefix_broken": exchange.prompt.prefix_broken,
                "choices": extras,
            }
        return body

    def of_tokens(self, exchange: PendingReply, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        """The fields of a choice, or of its part in a chunk, about these tokens of it."""
        fields: dict[str, Any] = {"logprobs": None}
        if exchange.chat.logprobs:
            entries = [
                {
                    **self._entry(token.id, token.logprob),
                    "top_logprobs": [self._entry(*other) for other in token.likeliest.items()],
                }
                for token in tokens
            ]
            fields["logprobs"] = {"content": entries, "refusal": None}
        if exchange.chat.return_token_ids:
            fields["token_ids"] = [token.id for token in tokens]
        return fields

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.text.piece(token)
        # A token that is part of a character has no text, and so no bytes of its own.
        known = None if "\N{REPLACEMENT CHARACTER}" in piece else list(piece.encode())
        return {"token": piece, "logprob": logprob, "bytes": known}

    def head(self, exchange: PendingReply) -> dict[str, Any]:
        """The fields that a reply and each of its chunks begin with."""
        return {"id": exchange.request.id, "created": int(time.time()), "model": self.name}


def _one_call_end(chat: ChatRequest, tool_format: ToolFormat | None) -> tuple[str, ...]:
    """Stop strings that leave one tool call at most, if the request asks for that."""
    if chat.parallel_tool_calls is not False or tool_format is None:
        return ()
    if not tool_format.marks[1]:
        reason = f"nothing marks the end of a call in the format {tool_format.name!r}"
        raise unsupported("parallel_tool_calls", f"= false is not supported: {reason}. Leave it out")
    return (tool_format.marks[1],)


def stop_at(text: ChatText, stops: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
    """Says after each token whether the response so far has one of these strings."""
    if not stops:
        return None
    # A character takes at most four tokens, so a string that ends here begins within this many.
    window = 4 * max(map(len, stops)) + 8

    def stopped(ids: Sequence[int]) -> bool:
        tail = text.decode(ids[-window:])
        return any(stop in tail for stop in stops)

    return stopped


def _message(parsed: ParsedReply, exchange: PendingReply, choice: int) -> Message:
    message: Message = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            {"id": _call_id(exchange, choice, i), "type": "function", "function": call.as_json()}
            for i, call in enumerate(parsed.calls)
        ]
    return message


def _call_id(exchange: PendingReply, choice: int, position: int) -> str:
    """Unique in its rollout, and the same when the same rollout is run again: some templates show it to the model."""
    request = exchange.request
    origin = (exchange.session or request.id, request.prompt_ids.tobytes(), request.seed, choice, position)
    return f"call_{hashlib.blake2b(repr(origin).encode(), digest_size=12).hexdigest()}"


async def stream_reply(model: ModelServer, exchange: PendingReply, backend: Backend) -> AsyncGenerator[dict[str, Any]]:
    """The chunks of a reply. Each has the tokens that came since the one before, also where their text comes later.

    The first has the prompt's ids, the last one usage and agl's extras, if they are asked for. Closing the iterator
    ends the sampling. A response of a back end that tells of no token comes in one chunk.
    """
    loop, news, tokens = asyncio.get_running_loop(), asyncio.Event(), list[SampledToken]()

    def add(token: SampledToken) -> None:
        tokens.append(token)
        news.set()

    def watch(token: SampledToken) -> None:
        loop.call_soon_threadsafe(add, token)

    of_prompt = {"prompt_token_ids": exchange.prompt.ids.tolist()} if exchange.chat.return_token_ids else {}

    def chunk(index: int, delta: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None, **fields}
        completion = {**head, **of_prompt, "choices": [choice]}
        of_prompt.clear()
        return completion

    generating = asyncio.ensure_future(backend.generate(replace(exchange.request, watch=watch)))
    generating.add_done_callback(lambda _: news.set())
    texts = [model.response_text(exchange) for _ in range(exchange.request.n)]
    head = {**model.head(exchange), "object": "chat.completion.chunk"}
    generated = None
    try:
        while generated is None:
            await news.wait()
            news.clear()
            came, tokens[:] = tokens[:], []
            if generating.done():
                generated = generating.result()
                rest = zip(generated.responses, texts, strict=True)
                came = [token for response, text in rest for token in response.tokens[len(text.ids) :]]
            for index, text in enumerate(texts):
                if some := [token for token in came if token.choice == index]:
                    role = {} if text.ids else {"role": "assistant"}
                    delta = role | _delta(text.feed([token.id for token in some]))
                    yield chunk(index, delta, **model.of_tokens(exchange, some))
    finally:
        generating.cancel()
    lasts = [text.end() for text in texts]
    body = model.finish(exchange, generated, texts)
    for index, (choice, last) in enumerate(zip(body["choices"], lasts, strict=True)):
        delta = _delta(last)
        if calls := choice["message"].get("tool_calls"):
            delta["tool_calls"] = [{"index": position, **call} for position, call in enumerate(calls)]
        yield chunk(index, delta, finish_reason=choice["finish_reason"], stop_reason=choice["stop_reason"])
    more = {"agl": body["agl"]} if "agl" in body else {}
    if more or (exchange.chat.stream_options or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": body["usage"], **more}


def _delta(parsed: ParsedReply) -> dict[str, Any]:
    texts = {"reasoning_content": parsed.reasoning, "content": parsed.content}
    return {name: text for name, text in texts.items() if text}
