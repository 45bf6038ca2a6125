"""One served model: chat requests in, token requests out, and back."""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from agl_core.types import FinishReason
from agl_torch.chat import ChatError, ChatText, Parsed, Prompt, Sessions, ToolFormat
from agl_torch.chat.messages import Message, normalise
from agl_torch.chat.stops import cut_at, stop_at
from agl_torch.sampling import Generated, Request, Response, SampledModel
from agl_torch.serve.request import ChatRequest


class ChatModel(SampledModel, Protocol):
    """What serving needs of a loaded model: what sampling does, and its tokenizer."""

    @property
    def tokenizer(self) -> Any: ...


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

    def __init__(self, name: str, loaded: ChatModel) -> None:
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
