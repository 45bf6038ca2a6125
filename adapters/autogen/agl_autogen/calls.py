"""LLM calls, where no gateway records them."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
from autogen_core import FunctionCall
from autogen_core.logging import LLMCallEvent
from autogen_core.models import (
    AssistantMessage,
    ChatCompletionClient,
    CreateResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import Tool, ToolSchema

from agl_autogen.watching import Arguments, Watch, argument, watch
from agl_core.capture import (
    AttemptContext,
    CapturedRollout,
    Identity,
    current_attempt,
    current_identity,
    guarded,
    ids_of,
    jsonable,
)
from agl_core.capture.context import holding
from agl_core.capture.reports import wrap_once
from agl_core.learning.transitions import Alone
from agl_core.types import Choice, Episode, FinishReason, Json

_MAX_REQUEST = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class AloneAttempt(AttemptContext):
    """An attempt without a server: its calls are kept here."""

    captured: CapturedRollout


class Recorded(Alone):
    """The episode of the agents in a `record` block.

    Its transitions have token ids where the endpoint returned them and did not stream.
    """

    result: Any = None
    """The agent's result; set it in the block if rewards need it."""

    def episode(self) -> Episode | None:
        """The block's calls as an episode; None before its end, and in a rollout of agl."""
        return next(iter(self.episodes()), None)


class _ModelCall(Watch):
    """A model client makes a reply."""

    def __init__(self, rollout: CapturedRollout, client: ChatCompletionClient, arguments: Arguments) -> None:
        self._rollout, self._who, self._outer = rollout, current_identity() or Identity(), _open.get()
        self._started, self._sequence = time.time(), rollout.next_sequence()
        self._is_kept = False
        self.reply: Mapping[str, Any] = {}
        """The endpoint's reply in AutoGen's event, with its token ids; there is none when streaming."""
        messages, named = argument(arguments, 0, "messages"), arguments[1]
        # A client's settings have no public name; a call is kept without them too.
        settings = {**getattr(client, "_create_args", {}), **named.get("extra_create_args", {})}
        self._request = jsonable(_request_body(messages, named.get("tools", ()), settings), limit=_MAX_REQUEST)

    def applied(self) -> AbstractContextManager[None]:
        return holding(_open, self)

    @guarded
    def item(self, item: Any) -> None:
        if self._is_kept or not isinstance(item, CreateResult):
            return
        self._is_kept = True
        if self._outer:
            # A client around another one, a cache say: there was one call.
            self._outer._is_kept = True
        if not self._rollout.is_finished and not item.cached:
            self._rollout.call(
                uuid.uuid4().hex,
                self._request,
                (_choice(item, self.reply),),
                sequence=self._sequence,
                who=self._who,
                started=self._started,
                prompt_ids=ids_of(self.reply.get("prompt_token_ids")),
            )


_open: ContextVar[_ModelCall | None] = ContextVar("agl_autogen_call", default=None)


@functools.cache
def attach() -> None:
    """Watch every model client, and the events that it makes of replies, whether they are logged or not."""
    watch(ChatCompletionClient, ("create", "create_stream"), _creating)
    wrap_once(LLMCallEvent, "__init__", _keeping_replies)


def _keeping_replies(init: Callable[..., None]) -> Callable[..., None]:
    def keeping(self: LLMCallEvent, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        call, reply = _open.get(), kwargs.get("response")
        if call and isinstance(reply, Mapping):
            call.reply = reply

    return keeping


def _creating(client: ChatCompletionClient, arguments: Arguments) -> Watch | None:
    active = current_attempt()
    return _ModelCall(active.captured, client, arguments) if isinstance(active, AloneAttempt) else None


def _request_body(
    messages: Sequence[LLMMessage], tools: Sequence[Tool | ToolSchema], settings: Mapping[str, Any]
) -> dict[str, Json]:
    """A call as a chat completion request: model and sampling beside messages and tools."""
    body = {**settings, "messages": [sent for message in messages for sent in _openai_messages(message)]}
    if tools:
        schemas = [tool.schema if isinstance(tool, Tool) else tool for tool in tools]
        body["tools"] = [{"type": "function", "function": schema} for schema in schemas]
    return body


def _choice(result: CreateResult, reply: Mapping[str, Any]) -> Choice:
    """The response of a call, with its token ids if `reply`, the endpoint's own, has them.

    Log-probabilities that are not one per token id are left out.
    """
    ids = ids_of((reply.get("choices") or [{}])[0].get("token_ids"))
    fit = result.logprobs and (ids is None or len(result.logprobs) == len(ids))
    return Choice(
        index=0,
        message=_assistant_message(result.content, result.thought),
        finish_reason=FinishReason.read(result.finish_reason, calls_tools=False),
        response_ids=ids,
        logprobs=np.array([token.logprob for token in result.logprobs or ()], np.float32) if fit else None,
    )


def _openai_messages(message: LLMMessage) -> Iterator[dict[str, Json]]:
    match message:
        case SystemMessage():
            yield {"role": "system", "content": message.content}
        case UserMessage(content=str()):
            yield {"role": "user", "content": message.content}
        case UserMessage():
            parts = [
                {"type": "text", "text": p} if isinstance(p, str) else p.to_openai_format() for p in message.content
            ]
            yield {"role": "user", "content": parts}
        case AssistantMessage():
            yield _assistant_message(message.content, message.thought)
        case FunctionExecutionResultMessage():
            for result in message.content:
                yield {"role": "tool", "tool_call_id": result.call_id, "content": result.content}


def _assistant_message(content: str | list[FunctionCall], thought: str | None) -> dict[str, Json]:
    if isinstance(content, str):
        reasoning = {"reasoning_content": thought} if thought else {}
        return {"role": "assistant", "content": content, **reasoning}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in content
    ]
    return {"role": "assistant", "content": thought, "tool_calls": calls}
