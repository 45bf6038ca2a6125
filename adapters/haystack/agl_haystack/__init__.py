"""agl's adapter for Haystack: who makes a call. The conversation shows tool results.

Haystack's one place for a tracer is the user's, so the function that opens a span of any tracer (also the one that does
nothing) is wrapped. A span is open in the task or thread of its component, agent or tool.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import agl_core
from agl_core.capture import StatusRule, begins, identify, wrap_once
from agl_core.capture.context import holding
from agl_core.capture.watching import in_rollout
from agl_core.types import ToolStatus

_RULES = (
    StatusRule(
        "haystack",
        ToolStatus.ERROR,
        begins(
            r"(?s: Failed\ to\ invoke\ Tool\ `[^`\n]{1,200}`\ with\ parameters\b (?: .*?\.\ Error:\s (?P<error>.*) )? )"
            r"| Tool\ '[^'\n]{1,200}'\ not\ found\.\ Available\ tools:"
        ),
    ),
)

_tool: ContextVar[str | None] = ContextVar("agl_haystack_tool", default=None)
"""The tool that this context runs, unless a component or an agent runs in it."""


@agl_core.adapter("haystack.tracing.tracer", name="haystack", status_rules=_RULES)
def haystack() -> None:
    """Haystack: the names of components in pipelines, and of agents that are tools."""
    from haystack.tracing.tracer import ProxyTracer

    wrap_once(ProxyTracer, "trace", _seen)


def _seen(trace: Callable[..., AbstractContextManager[Any]]) -> Callable[..., AbstractContextManager[Any]]:
    @contextmanager
    def tracing(self: Any, operation_name: str, tags: dict[str, Any] | None = None, **given: Any) -> Iterator[Any]:
        with in_rollout(_inside, operation_name, tags or {}), trace(self, operation_name, tags, **given) as span:
            yield span

    return tracing


@contextmanager
def _inside(operation: str, tags: Mapping[str, Any]) -> Iterator[None]:
    """Calls in a span are its component's or agent's. An agent has its tool's name, else its place in a pipeline."""
    kind, span = operation.removeprefix("haystack."), uuid.uuid4().hex
    names = {"component.run": tags.get("haystack.component.name"), "agent.run": _tool.get(), "agent.step": None}
    if kind == "agent.step.tool":
        with holding(_tool, tags.get("haystack.tool.name")):
            yield
    elif kind in names:
        with identify(names[kind], span=span, parent_span=span), holding(_tool, None):
            yield
    else:
        yield
