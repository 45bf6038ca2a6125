"""LLM calls: the tools that they ask for, and, where no gateway records them, the calls themselves."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from autogen_core import FunctionCall
from autogen_core.logging import LLMCallEvent
from autogen_core.models import ChatCompletionClient, CreateResult

from agl_autogen import messages as words
from agl_core.capture import (
    ActiveAttempt,
    CapturedRollout,
    Identity,
    ToolRequest,
    current_attempt,
    current_identity,
    guarded,
    jsonable,
)
from agl_core.capture.attach.methods import Arguments, Watch, argument, watch, wrap_once
from agl_core.capture.context import holding
from agl_core.capture.spans.spans import loads

_MAX_REQUEST = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class AloneAttempt(ActiveAttempt):
    """An attempt without a server: its calls are kept here."""

    captured: CapturedRollout


class _ModelCall(Watch):
    """A model client makes a reply."""

    def __init__(self, active: ActiveAttempt, client: ChatCompletionClient, arguments: Arguments) -> None:
        self._recording = active.recording
        self._captured = active.captured if isinstance(active, AloneAttempt) else None
        self._who, self._outer = current_identity() or Identity(), _open.get()
        self._span, self._started = uuid.uuid4().hex, time.time()
        self._is_reported = False
        self.reply: Mapping[str, Any] = {}
        """The endpoint's reply in AutoGen's event, with its token ids; there is none when streaming."""
        if self._captured:
            self._sequence = self._captured.next_sequence()
            given, named = argument(arguments, 0, "messages"), arguments[1]
            # A client's settings have no public name; a call is kept without them too.
            settings = {**getattr(client, "_create_args", {}), **named.get("extra_create_args", {})}
            self._request = jsonable(words.request_body(given, named.get("tools", ()), settings), limit=_MAX_REQUEST)

    def applied(self) -> AbstractContextManager[None]:
        return holding(_open, self)

    @guarded
    def item(self, item: Any) -> None:
        if self._is_reported or not isinstance(item, CreateResult):
            return
        self._is_reported = True
        if self._outer:
            # A client around another one, a cache say: there was one call.
            self._outer._is_reported = True
        for asked in item.content:
            if isinstance(asked, FunctionCall):
                arguments = loads(asked.arguments)
                who = self._who
                spans = frozenset([who.parent_span] if who.parent_span else [])
                self._recording.asked(ToolRequest(asked.id, asked.name, arguments, who.agent, who.parent_span, spans))
        if self._captured and not self._captured.is_finished and not item.cached:
            self._captured.call(
                self._span,
                self._request,
                (words.choice(item, self.reply),),
                sequence=self._sequence,
                who=self._who,
                started=self._started,
                prompt_ids=words.prompt_ids(self.reply),
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
    return _ModelCall(active, client, arguments) if active else None
