"""The OpenAI-compatible API of an engine: chat requests in, token requests to its back end, replies out.

A field of a request that changes what the model reads, what it samples or what the reply has is honoured, or refused by
name. All others tune somebody else's service: they are ignored and noted (`ChatRequest.unknown`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse
from starlette.routing import Route

from agl_chat.conversation import ChatError, ChatText, Prompt, Sessions, normalise
from agl_chat.formats import Message, Parsed, ToolFormat
from agl_chat.parsing import ReplyParser
from agl_chat.requests import Backend, Generated, Request, Response, SampledToken
from agl_chat.streaming import ResponseText, stream_reply
from agl_core.capture.requests import HEADER_IGNORED, HEADER_POLICY, HEADER_ROLLOUT
from agl_core.errors import AglError, nearest
from agl_core.learning.transitions import DISTORTING, FORMATS, distorting, grammar_of
from agl_core.types import FinishReason
from agl_core.types.forms import parse_json

Result = TypeVar("Result")
CHAT_COMPLETIONS = "/v1/chat/completions"
MAX_CHOICES = 128
_LONGEST_NOTE = 1000
"""Characters."""


def create_app(models: Mapping[str, ModelServer], backend: Backend, *, api_key: str) -> Starlette:
    """`POST /v1/chat/completions` for these models, by the name that clients ask for.

    Every request needs `Authorization: Bearer <api_key>`. The header `x-agl-rollout` names the session whose earlier
    replies are recognised when they are echoed.
    """

    async def chat_completions(request: HttpRequest) -> HttpResponse:
        sent = request.headers.get("authorization", "")
        if not hmac.compare_digest(sent.encode(), f"Bearer {api_key}".encode()):
            raise ChatError(
                "Wrong API key: send 'Authorization: Bearer <key>' with the key of this run's engine.",
                code="invalid_api_key",
                status=401,
            )
        chat = parse_request(await request.body())
        model = models.get(chat.model)
        if model is None:
            raise ChatError(
                f"There is no model {chat.model!r}. {nearest(chat.model, models)}",
                param="model",
                code="model_not_found",
                status=404,
            )
        exchange = model.begin(chat, request.headers.get(HEADER_ROLLOUT))
        headers = {}
        if exchange.ignored:
            # A name may be anything, and a header may not.
            headers[HEADER_IGNORED] = quote(", ".join(exchange.ignored), safe=", ")[:_LONGEST_NOTE]
        if chat.stream:
            chunks = stream_reply(model, exchange, backend)
            first = await _unless_gone(request, anext(chunks))  # Until then an error has a status of its own.
            if first is None:
                return HttpResponse(status_code=499)
            return StreamingResponse(_events(first, chunks), 200, headers, media_type="text/event-stream")
        generated = await _unless_gone(request, backend.generate(exchange.request))
        if generated is None:
            return HttpResponse(status_code=499)
        headers[HEADER_POLICY] = str(generated.version)
        return _json(model.finish(exchange, generated), headers=headers)

    async def refuse(request: HttpRequest, error: Exception) -> HttpResponse:
        error = _chat_error(error)
        return _json(error.body, status=error.status)

    routes = [Route(CHAT_COMPLETIONS, chat_completions, methods=["POST"])]
    return Starlette(routes=routes, exception_handlers={AglError: refuse})


def _chat_error(error: Exception) -> ChatError:
    return error if isinstance(error, ChatError) else ChatError(str(error), code="engine_error", status=500)


async def _events(first: Mapping[str, Any], chunks: AsyncGenerator[Mapping[str, Any]]) -> AsyncIterator[bytes]:
    """Chunks as server-sent events; an error ends them."""
    async with contextlib.aclosing(chunks):
        yield _event(first)
        try:
            async for chunk in chunks:
                yield _event(chunk)
            yield b"data: [DONE]\n\n"
        except AglError as error:
            yield _event(_chat_error(error).body)


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def _unless_gone(request: HttpRequest, generate: Awaitable[Result]) -> Result | None:
    """Generate, but give up when the client hangs up."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    generating, watching = asyncio.ensure_future(generate), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait({generating, watching}, return_when=asyncio.FIRST_COMPLETED)
        return generating.result() if generating.done() else None
    finally:
        generating.cancel()
        watching.cancel()


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpResponse:
    return HttpResponse(orjson.dumps(body), status, headers, media_type="application/json")


class FunctionTool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(min_length=1)


class Tool(BaseModel):
    """One entry of `tools`, and a `tool_choice` that names one."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["function"] = "function"
    function: FunctionTool


class ChatRequest(BaseModel):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str
    messages: list[dict[str, Any]]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = Field(None, description="Reply with token ids, and with agl's extras.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables for the chat template.")

    @property
    def unknown(self) -> dict[str, Any]:
        """The fields that ask for something and are not honoured here."""
        given = {name: value for name, value in (self.model_extra or {}).items() if value not in (None, "", [], {})}
        return {name: value for name, value in given.items() if name not in (*_NOT_SERVED, *DISTORTING, *FORMATS)}

    @property
    def grammar(self) -> str | None:
        """The form that replies must have, if there is one."""
        return grammar_of({**(self.model_extra or {}), "tools": self.tools, "tool_choice": self.tool_choice})

    @property
    def limit(self) -> int | None:
        """The most tokens a response may have; None: as many as the context has room for."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that the model sees: none when it must not call any."""
        return [] if self.tool_choice == "none" else [tool.model_dump() for tool in self.tools or []]

    @property
    def forces_tool(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, Tool)

    @property
    def forced_tool(self) -> str | None:
        """The one tool that must be called; None if any will do. The only tool there is, when one is required."""
        if isinstance(self.tool_choice, Tool):
            return self.tool_choice.function.name
        return self.tools[0].function.name if self.tools and len(self.tools) == 1 else None


def parse_request(body: bytes) -> ChatRequest:
    """Check a request's body. Raises ChatError that names the field and what to do."""
    try:
        fields = parse_json(body)
        if not isinstance(fields, dict):
            raise ChatError("The request body is no JSON object.")
        _refuse_unsupported(fields)
        request = ChatRequest.model_validate(fields)
    except orjson.JSONDecodeError as error:
        raise ChatError(f"The request body is no JSON: {error}.") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise ChatError(f"{path}: {first['msg']}", param=str(first["loc"][0]), code="invalid_value") from None
    names = [tool.function.name for tool in request.tools or []]
    if request.forces_tool and not names:
        raise ChatError("tool_choice asks for a tool call, but there are no tools.", param="tool_choice")
    if isinstance(request.tool_choice, Tool) and request.forced_tool not in names:
        raise ChatError(
            f"tool_choice names {request.forced_tool!r}, which is not among the tools. "
            f"{nearest(str(request.forced_tool), names)}",
            param="tool_choice",
        )
    return request


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name in distorting(fields):
        raise _unsupported(f"{name} = {fields[name]!r}", "log-probabilities are of the unchanged distribution", name)
    for name, (neutral, reason) in _NOT_SERVED.items():
        value = fields.get(name)
        if value is not None and value is not False and value not in (neutral, "", [], {}):
            raise _unsupported(f"{name} = {str(value)[:60]}", reason, name)


def _unsupported(what: str, reason: str, param: str) -> ChatError:
    return ChatError(
        f"{what} is not supported: {reason}. Leave {param} out.", param=param, code="unsupported_parameter"
    )


_TEXT_ALONE = "this engine reads and writes text alone"
_ENDS = "a response ends at the model's own end token, at 'stop' or at 'max_tokens'"
_OWN_TEMPLATE = "messages are rendered by the model's own chat template, up to where its reply begins"
_NOT_SERVED: Mapping[str, tuple[Any, str]] = {
    "prompt_logprobs": (None, "log-probabilities are returned of responses alone"),
    "functions": ([], "it is the older form of tools. Send 'tools'"),
    "audio": (None, _TEXT_ALONE),
    "modalities": (["text"], _TEXT_ALONE),
    "web_search_options": (None, "it needs OpenAI's own servers. Give the model a tool that searches"),
    "best_of": (1, "it samples more than it returns. Use 'n', and choose among the choices"),
    "ignore_eos": (False, _ENDS),
    "stop_token_ids": ([], _ENDS),
    "echo": (False, _OWN_TEMPLATE),
    "continue_final_message": (False, _OWN_TEMPLATE),
    "chat_template": (None, _OWN_TEMPLATE),
    "documents": ([], _OWN_TEMPLATE),
    "truncate_prompt_tokens": (None, "prompts are never cut: one that is too long is refused"),
}
"""Fields that ask for what this engine does not do, the value with which they do not, and why or what instead."""
_FOR_TEMPLATES = ("reasoning_effort",)
"""Fields of a request that some templates have a variable for."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """A chat request on its way through the sampler."""

    chat: ChatRequest
    session: str | None
    messages: list[Message]
    prompt: Prompt
    request: Request
    parser: Callable[[], ReplyParser]
    """Makes a parser of one choice's text."""
    ignored: tuple[str, ...]
    """The fields of the request that nothing here honours."""


class ModelServer:
    """A model as a chat API sees it. Used from one thread (the event loop's).

    `name` is what clients ask for, and what the back end knows it by; `context_length` is the most tokens that prompt
    and response have together.
    """

    def __init__(self, name: str, text: ChatText, context_length: int) -> None:
        self.name, self.text = name, text
        self._context_length = context_length
        self._sessions = Sessions(self.text)

    def begin(self, chat: ChatRequest, session: str | None) -> Exchange:
        """Make a sampling request of a chat request. Raises ChatError if it cannot be answered."""
        tool_format = self._tool_format(chat)
        messages, ignored = normalise(chat.messages), chat.unknown
        known = {name: ignored.pop(name) for name in _FOR_TEMPLATES if name in ignored and name in self.text.template}
        options = known | (chat.chat_template_kwargs or {})
        prompt = self._sessions.prompt(session, messages, tools=chat.shown_tools, options=options)
        length, context = len(prompt.ids), self._context_length
        if length + 1 > context:
            raise ChatError(
                f"This model's context is {context} tokens, and the messages alone are {length}: there is no room for "
                "a response. Shorten the messages.",
                param="messages",
                code="context_length_exceeded",
            )
        stops = (*chat.stops, *_one_call_end(chat, tool_format))
        forced = self.text.forced_prefix(prompt.text, chat.forced_tool) if chat.forces_tool else ""
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
            model=self.name,
        )
        parser = functools.partial(self.text.parser, prompt.text, chat.shown_tools)
        return Exchange(chat, session, messages, prompt, request, parser, tuple(ignored))

    def _tool_format(self, chat: ChatRequest) -> ToolFormat | None:
        if not chat.shown_tools:
            return None
        if self.text.tool_format is None or not self.text.takes_tools:
            raise ChatError(
                f"The chat template of {self.name!r} writes tool calls in no format that this engine knows "
                "(see agl_chat.formats), so tools cannot be offered to it.",
                param="tools",
                code="tools_not_supported",
            )
        return self.text.tool_format

    def response_text(self, exchange: Exchange) -> ResponseText:
        """An empty text for a response's tokens."""
        return ResponseText(self.text, exchange.parser(), exchange.chat.stops)

    def finish(
        self, exchange: Exchange, generated: Generated, texts: Sequence[ResponseText] | None = None
    ) -> dict[str, Any]:
        """The reply's body; the session remembers it. `texts` are those of the responses where they were streamed."""
        if texts is None:
            texts = [self.response_text(exchange) for _ in generated.responses]
            for text, response in zip(texts, generated.responses, strict=True):
                text.feed(response.ids.tolist())
                text.end()
        choices, extras, replies = [], [], []
        for index, (response, text) in enumerate(zip(generated.responses, texts, strict=True)):
            if not np.isfinite(response.logprobs).all():
                raise ChatError(
                    f"The model's output is not finite (policy version {generated.version}): training has diverged.",
                    code="non_finite",
                    status=500,
                )
            message = _message(text.parsed, exchange, index)
            choice = self._choice(exchange, index, message, response)
            choices.append({**choice, "stop_reason": text.stop})
            mask = None if response.mask is None else response.mask.tolist()
            extras.append({"mask": mask, "parse_error": text.parsed.error})
            replies.append((normalise([message])[0], response.ids))
        if exchange.session is not None:
            self._sessions.record(exchange.session, exchange.messages, exchange.prompt, replies)
        body = self._body(exchange, generated, choices)
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

    def _choice(self, exchange: Exchange, index: int, message: Message, response: Response) -> dict[str, Any]:
        reason = response.finish_reason
        if "tool_calls" in message and reason is FinishReason.STOP:
            reason = FinishReason.TOOL_CALLS
        choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": reason.value, "logprobs": None}
        if exchange.chat.logprobs:
            choice["logprobs"] = {"content": self.entries(response.tokens(index)), "refusal": None}
        if exchange.chat.return_token_ids:
            choice["token_ids"] = response.ids.tolist()
        return choice

    def entries(self, tokens: Sequence[SampledToken]) -> list[dict[str, Any]]:
        """The log-probabilities of tokens, as a choice has them."""
        return [
            {
                **self._entry(token.id, token.logprob),
                "top_logprobs": [self._entry(*other) for other in token.likeliest.items()],
            }
            for token in tokens
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.text.piece(token)
        # A token that is part of a character has no text, and so no bytes of its own.
        known = None if "\N{REPLACEMENT CHARACTER}" in piece else list(piece.encode())
        return {"token": piece, "logprob": logprob, "bytes": known}

    def head(self, exchange: Exchange) -> dict[str, Any]:
        """The fields that a reply and each of its chunks begin with."""
        return {"id": exchange.request.id, "created": int(time.time()), "model": self.name}

    def _body(self, exchange: Exchange, generated: Generated, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prompt, completion = len(exchange.prompt.ids), sum(len(r.ids) for r in generated.responses)
        return {
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


def _one_call_end(chat: ChatRequest, tool_format: ToolFormat | None) -> tuple[str, ...]:
    """Where to stop so that there is one tool call at most, if that is asked for."""
    if chat.parallel_tool_calls is not False or tool_format is None:
        return ()
    if tool_format.call_end is None:
        reason = f"nothing marks the end of a call in the format {tool_format.name!r}"
        raise _unsupported("parallel_tool_calls=false", reason, "parallel_tool_calls")
    return (tool_format.call_end,)


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


def _message(parsed: Parsed, exchange: Exchange, choice: int) -> Message:
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


def _call_id(exchange: Exchange, choice: int, position: int) -> str:
    """Unique in its rollout, and the same when the same rollout is run again: some templates show it to the model."""
    request = exchange.request
    origin = (exchange.session or request.id, request.prompt_ids.tobytes(), request.seed, choice, position)
    return f"call_{hashlib.blake2b(repr(origin).encode(), digest_size=12).hexdigest()}"
