"""LLM calls: the tools that they ask for, and, where no gateway records them, the calls themselves."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from agl_core.capture.attach.methods import Arguments, Watch, argument, watch
from agl_core.capture.spans.spans import loads
from agl_core.types import Call

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
        self._is_told = False
        self.reply: Mapping[str, Any] = {}
        """The endpoint's reply as AutoGen's event tells it, with its token ids; there is none when streaming."""
        if self._captured:
            self._sequence = self._captured.next_sequence()
            given, named = argument(arguments, 0, "messages"), arguments[1]
            # A client's settings have no public name; without them the call is kept all the same.
            settings = {**getattr(client, "_create_args", {}), **named.get("extra_create_args", {})}
            self._request = jsonable(words.request_body(given, named.get("tools", ()), settings), limit=_MAX_REQUEST)

    @contextmanager
    def applied(self) -> Iterator[None]:
        token = _open.set(self)
        try:
            yield
        finally:
            _open.reset(token)

    @guarded
    def item(self, item: Any) -> None:
        if self._is_told or not isinstance(item, CreateResult):
            return
        self._is_told = True
        if self._outer:
            # A client around another one, a cache say: there was one call.
            self._outer._is_told = True
        for asked in item.content:
            if isinstance(asked, FunctionCall):
                arguments = loads(asked.arguments)
                who = self._who
                spans = frozenset([who.parent_span] if who.parent_span else [])
                self._recording.asked(ToolRequest(asked.id, asked.name, arguments, who.agent, who.parent_span, spans))
        if self._captured and not self._captured.is_finished and not item.cached:
            self._captured.call(self._call(self._captured.id, item))

    def _call(self, rollout: str, result: CreateResult) -> Call:
        sampling = words.requested_sampling(self._request)
        return Call(
            # Not the reply's own id: there are servers that give the same one to every reply.
            id=self._span,
            rollout=rollout,
            attempt=0,
            sequence=self._sequence,
            policy=str(self._request.get("model") or "unknown"),
            version=None,
            request=self._request,
            choices=(words.choice(result, self.reply),),
            started=self._started,
            ended=time.time(),
            agent=self._who.agent,
            parent_span=self._who.parent_span,
            prompt_ids=words.prompt_ids(self.reply),
            requested=sampling,
            effective=sampling,
        )


_open: ContextVar[_ModelCall | None] = ContextVar("agl_autogen_call", default=None)


@functools.cache
def attach() -> None:
    """Watch every model client, and the events that it makes of replies, whether they are logged or not."""
    watch(ChatCompletionClient, ("create", "create_stream"), _creating)
    told = LLMCallEvent.__init__

    @functools.wraps(told)
    def telling(self: LLMCallEvent, *args: Any, **kwargs: Any) -> None:
        told(self, *args, **kwargs)
        call, reply = _open.get(), kwargs.get("response")
        if call and isinstance(reply, Mapping):
            call.reply = reply

    LLMCallEvent.__init__ = telling  # type: ignore[method-assign]


def _creating(client: ChatCompletionClient, arguments: Arguments) -> Watch | None:
    active = current_attempt()
    return _ModelCall(active, client, arguments) if active else None
