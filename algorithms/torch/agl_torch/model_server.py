"""One served model: chat requests in, token requests out, and back.

A field of a request that changes what the model reads, what it samples or what the reply has is honoured, or refused by
name. All others tune somebody else's service: they are ignored and noted (`ChatRequest.unknown`).
"""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agl_core.errors import nearest
from agl_core.learning.transitions import DISTORTING, distorting
from agl_core.types import FinishReason
from agl_torch.chat import ChatError, ChatText, Parsed, Prompt, Sessions, ToolFormat
from agl_torch.chat.messages import Message, normalise
from agl_torch.chat.text import cut_at, stop_at
from agl_torch.models.loading import LoadedModel
from agl_torch.sampling import Generated, Request, Response

MAX_CHOICES = 128


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class FunctionTool(_Part):
    """A function that the model may call."""

    name: str = Field(min_length=1)


class Tool(_Part):
    """One entry of `tools`."""

    type: Literal["function"] = "function"
    function: FunctionTool


class NamedTool(_Part):
    """A `tool_choice` that names a function."""

    type: Literal["function"] = "function"
    function: FunctionTool


class ChatRequest(BaseModel):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str
    messages: list[dict[str, Any]]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = Field(None, description="Reply with token ids, and with agl's extras.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables for the chat template.")

    @property
    def unknown(self) -> Mapping[str, Any]:
        """The fields that ask for something and are not honoured here."""
        others = (self.model_extra or {}).items()
        return {name: value for name, value in others if value and name not in _NOT_SERVED and name not in DISTORTING}

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
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def forced_tool(self) -> str | None:
        """The one tool that must be called; None if any will do. The only tool there is, when one is required."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.function.name
        return self.tools[0].function.name if self.tools and len(self.tools) == 1 else None


def parse_request(body: Any) -> ChatRequest:
    """Check a decoded JSON body. Raises ChatError that names the field and what to do."""
    if not isinstance(body, dict):
        raise ChatError("The request body is no JSON object.")
    _refuse_unsupported(body)
    try:
        request = ChatRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ChatError(f"{place}: {first['msg']}", param=str(first["loc"][0]), code="invalid_value") from None
    _check_tools(request)
    return request


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name in distorting(body):
        raise _unsupported(
            f"{name} = {body[name]!r} is not supported: log-probabilities are recorded of the unchanged distribution. "
            f"Leave {name} out.",
            name,
        )
    for name, (neutral, why) in _NOT_SERVED.items():
        value = body.get(name)
        if value is not None and value is not False and value not in (neutral, "", [], {}):
            raise _unsupported(f"{name} = {str(value)[:60]} is not supported: {why}.", name)


def _unsupported(message: str, param: str) -> ChatError:
    return ChatError(message, param=param, code="unsupported_parameter")


_TEXT_ALONE = "this engine reads and writes text alone"
_UNENFORCED = (
    "a format cannot be enforced by this engine. Ask for it in the prompt, or give the model a tool with this schema"
)
_ENDS = "a response ends at the model's own end token, at 'stop' or at 'max_tokens'"
_OWN_TEMPLATE = "messages are rendered by the model's own chat template, up to where its reply begins"
_NOT_SERVED: Mapping[str, tuple[Any, str]] = {
    "stream": (False, "this engine does not stream. Send stream=false, or ask agl's gateway, which streams replies"),
    "top_logprobs": (
        0,
        "this engine returns the log-probabilities of the sampled tokens, and of no others. Send logprobs=true alone "
        "(in /v1/completions, logprobs=0)",
    ),
    "prompt_logprobs": (None, "this engine returns the log-probabilities of responses alone. Leave it out"),
    "functions": ([], "it is the older form of tools. Send 'tools'"),
    "response_format": ({"type": "text"}, _UNENFORCED),
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), (None, _UNENFORCED)
    ),
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
"""Fields that ask for what this engine does not do, the value with which they do not, and what to do instead."""


def _check_tools(request: ChatRequest) -> None:
    names = [tool.function.name for tool in request.tools or []]
    if request.forces_tool and not names:
        raise ChatError("tool_choice asks for a tool call, but there are no tools.", param="tool_choice")
    if isinstance(request.tool_choice, NamedTool) and request.forced_tool not in names:
        raise ChatError(
            f"tool_choice names {request.forced_tool!r}, which is not among the tools. "
            f"{nearest(str(request.forced_tool), names)}",
            param="tool_choice",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """A chat request on its way through the sampler."""

    chat: ChatRequest
    session: str | None
    sequence: int
    messages: list[Message]
    prompt: Prompt
    request: Request
    tool_format: ToolFormat | None
    """The format in which tool calls are looked for; None: not at all."""
    ignored: tuple[str, ...]
    """The fields of the request that nothing here honours."""

    def parse(self, text: str) -> Parsed:
        return self.tool_format.parse(text) if self.tool_format else Parsed(text)


class ModelServer:
    """A loaded model as a chat API sees it. Used from one thread (the event loop's).

    `name` is what clients ask for, and the name of the model's sampler in the engine loop.
    """

    def __init__(self, name: str, loaded: LoadedModel) -> None:
        self.name = name
        self.context_length = loaded.context_length
        self.text = ChatText(loaded.tokenizer, loaded.eos_ids)
        self._sessions = Sessions(self.text)

    def begin(self, chat: ChatRequest, session: str | None) -> Exchange:
        """Make a sampling request of a chat request. Raises ChatError if it cannot be answered."""
        tool_format = self._tool_format(chat)
        messages = normalise(chat.messages)
        unknown = dict(chat.unknown)
        known = {name: unknown.pop(name) for name in self.text.variables & unknown.keys()}
        prompt = self._sessions.prompt(
            session,
            messages,
            tools=chat.shown_tools,
            options=known | (chat.chat_template_kwargs or {}),
            parse=tool_format.parse if tool_format else Parsed,
        )
        length, context = len(prompt.ids), self.context_length
        if length + 1 > context:
            raise ChatError(
                f"This model's context is {context} tokens, and the messages alone are {length}: there is no room for "
                "a response. Shorten the messages.",
                param="messages",
                code="context_length_exceeded",
            )
        request = Request(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            prompt_ids=prompt.ids,
            max_tokens=chat.limit or context,
            n=chat.n or 1,
            temperature=1.0 if chat.temperature is None else chat.temperature,
            top_p=1.0 if chat.top_p is None else chat.top_p,
            seed=secrets.randbits(63) if chat.seed is None else chat.seed,
            forced_ids=self._forced_ids(chat, tool_format),
            stop=stop_at(self.text, chat.stops, _one_call_end(chat, tool_format)),
        )
        sequence = 0 if session is None else self._sessions.next_call(session)
        return Exchange(chat, session, sequence, messages, prompt, request, tool_format, tuple(unknown))

    def _tool_format(self, chat: ChatRequest) -> ToolFormat | None:
        if not chat.shown_tools:
            return None
        if self.text.tool_format is None or not self.text.takes_tools:
            raise ChatError(
                f"The chat template of {self.name!r} writes tool calls in no format that this engine knows "
                "(see agl_torch.chat.FORMATS), so tools cannot be offered to it.",
                param="tools",
                code="tools_not_supported",
            )
        return self.text.tool_format

    def _forced_ids(self, chat: ChatRequest, tool_format: ToolFormat | None) -> tuple[int, ...]:
        if not chat.forces_tool or tool_format is None:
            return ()
        prefix = tool_format.forced_prefix(chat.forced_tool)
        if prefix is None:
            raise ChatError(
                f"A tool call cannot be forced in the format {tool_format.name!r}: use tool_choice='auto'.",
                param="tool_choice",
                code="unsupported_parameter",
            )
        return tuple(self.text.encode(prefix))

    def finish(self, exchange: Exchange, generated: Generated) -> dict[str, Any]:
        """The reply's body; the session remembers it."""
        choices, extras, replies = [], [], []
        for index, response in enumerate(generated.responses):
            if not np.isfinite(response.logprobs).all():
                raise ChatError(
                    f"The model's output is not finite (policy version {generated.version}): training has diverged.",
                    code="non_finite",
                    status=500,
                )
            text = self.text.decode(response.ids.tolist())
            parsed = exchange.parse(cut_at(text, exchange.chat.stops))
            message = _message(parsed, [_call_id(exchange, index, i) for i in range(len(parsed.calls))])
            choice = self._choice(exchange, index, message, parsed, response)
            choices.append({**choice, "stop_reason": _stopped_by(text, exchange.chat.stops)})
            mask = None if response.mask is None else response.mask.tolist()
            extras.append({"mask": mask, "parse_error": parsed.error})
            replies.append((normalise([message])[0], response.ids))
        if exchange.session is not None:
            self._sessions.record(exchange.session, exchange.messages, exchange.prompt, replies)
        return self._body(exchange, generated, choices, extras)

    def _choice(
        self, exchange: Exchange, index: int, message: Message, parsed: Parsed, response: Response
    ) -> dict[str, Any]:
        reason = response.finish_reason
        if parsed.calls and reason is FinishReason.STOP:
            reason = FinishReason.TOOL_CALLS
        choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": reason.value, "logprobs": None}
        if exchange.chat.logprobs:
            choice["logprobs"] = {"content": self._logprobs(response), "refusal": None}
        if exchange.chat.return_token_ids:
            choice["token_ids"] = response.ids.tolist()
        return choice

    def _logprobs(self, response: Response) -> list[dict[str, Any]]:
        entries = []
        for token, logprob in zip(response.ids.tolist(), response.logprobs.tolist(), strict=True):
            piece = self.text.piece(token)
            # A token that is part of a character has no text, and so no bytes of its own.
            known = None if "\N{REPLACEMENT CHARACTER}" in piece else list(piece.encode())
            entries.append({"token": piece, "logprob": logprob, "bytes": known, "top_logprobs": []})
        return entries

    def _body(
        self, exchange: Exchange, generated: Generated, choices: list[dict[str, Any]], extras: list[dict[str, Any]]
    ) -> dict[str, Any]:
        prompt, completion = len(exchange.prompt.ids), sum(len(r.ids) for r in generated.responses)
        body: dict[str, Any] = {
            "id": exchange.request.id,
            "object": "chat.completion",
            "model": self.name,
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


def _one_call_end(chat: ChatRequest, tool_format: ToolFormat | None) -> str | None:
    """Where to stop so that there is one tool call at most, if that is asked for."""
    if chat.parallel_tool_calls is not False or tool_format is None:
        return None
    if tool_format.call_end is None:
        raise ChatError(
            f"parallel_tool_calls=false cannot be enforced in the format {tool_format.name!r}: leave it out.",
            param="parallel_tool_calls",
            code="unsupported_parameter",
        )
    return tool_format.call_end


def _stopped_by(text: str, stops: Sequence[str]) -> str | None:
    """The stop string that ended a response, the first in its text; None where none did. vLLM says it too.

    >>> _stopped_by("1 2 STOP 3", ["3", "STOP"])
    'STOP'
    """
    return min((stop for stop in stops if stop in text), key=text.find, default=None)


def _message(parsed: Parsed, call_ids: Sequence[str]) -> Message:
    message: Message = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": call.as_json()}
            for call_id, call in zip(call_ids, parsed.calls, strict=True)
        ]
    return message


def _call_id(exchange: Exchange, choice: int, position: int) -> str:
    """Unique in its rollout, and the same when the same rollout is run again: some templates show it to the model."""
    origin = (exchange.session or exchange.request.id, exchange.sequence, exchange.request.seed, choice, position)
    return f"call_{hashlib.blake2b(repr(origin).encode(), digest_size=12).hexdigest()}"
