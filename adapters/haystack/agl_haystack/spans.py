"""Who makes a call. What the tools did, the conversation shows: Haystack words each failure in its own way.

Haystack has one place for a tracer, which is the user's. So the function that opens a span of whatever tracer there is
(of the one that does nothing, too) is wrapped. A span is open in the task or thread of what it is about.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from haystack.tracing.tracer import ProxyTracer

from agl_core.capture import current_attempt, enter_identity, report_problem
from agl_core.capture.context import holding
from agl_core.capture.wrapping import wrap_once
from agl_core.types import Identity

_AGENT, _COMPONENT, _STEP, _TOOL = (
    "haystack.agent.run",
    "haystack.component.run",
    "haystack.agent.step",
    "haystack.agent.step.tool",
)
_ENTERS = (_AGENT, _COMPONENT, _STEP)
_NAMED_BY = {_COMPONENT: "haystack.component.name", _TOOL: "haystack.tool.name"}
"""The tags with the names."""

_tool: ContextVar[str | None] = ContextVar("agl_haystack_tool", default=None)
"""The tool that this context runs, unless a component or an agent runs in it."""


def watch() -> None:
    """Watch what is traced; calling it again changes nothing."""
    wrap_once(ProxyTracer, "trace", _naming)


def _naming(trace: Callable[..., AbstractContextManager[Any]]) -> Callable[..., AbstractContextManager[Any]]:
    @contextmanager
    def tracing(self: Any, operation_name: str, tags: dict[str, Any] | None = None, **given: Any) -> Iterator[Any]:
        with ExitStack() as stack:
            if current_attempt() is not None:
                _enter(stack, operation_name, tags or {})
            yield stack.enter_context(trace(self, operation_name, tags, **given))

    return tracing


def _enter(stack: ExitStack, operation: str, tags: Mapping[str, Any]) -> None:
    """Until the stack is closed, calls are those of what the span is about."""
    try:
        name = tags.get(_NAMED_BY.get(operation, ""))
        if operation == _TOOL:
            stack.enter_context(holding(_tool, name))
        if operation not in _ENTERS:
            return
        if operation == _AGENT:
            # An agent has no name of its own: it is known by the tool that it is, or by its place in a pipeline.
            name = _tool.get()
        span = uuid.uuid4().hex
        stack.callback(enter_identity(Identity(name, span, span)).close)
        if operation != _STEP:
            stack.enter_context(holding(_tool, None))
    except Exception as error:
        report_problem(f"Reading the span {operation} of Haystack", error)
