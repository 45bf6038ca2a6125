"""Who makes a call: the agent whose turn encloses it in the SDK's spans."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import Token
from typing import Any

from agents.tracing import AgentSpanData, GuardrailSpanData, Span, SpanData, TurnSpanData, get_current_span

from agl_core.capture import Identity

_UNTRACED = "no-op"
"""The id of all spans of a run whose tracing is disabled; they have their agents all the same."""


def who_calls() -> Identity | None:
    """Who makes a request that is sent now; None outside any agent."""
    span = get_current_span()
    return identity_of(span) if span else None


def identity_of(span: Span[Any]) -> Identity | None:
    """The agent, or the guardrail, that an open span belongs to."""
    for each in _outwards(span):
        name = _speaker(each.span_data)
        if name is not None:
            return Identity(name, _id(span), _id(each))
    return None


def _outwards(span: Span[Any] | None) -> Iterator[Span[Any]]:
    while span is not None:
        yield span
        # The span that was current before: unlike `parent_id`, it is known for untraced spans too.
        before: Token[Span[Any] | None] | None = span._prev_span_token  # type: ignore[attr-defined]
        outer = before.old_value if before else None
        span = None if outer is Token.MISSING else outer


def _speaker(data: SpanData) -> str | None:
    if isinstance(data, TurnSpanData):
        return data.agent_name
    # Turns can be switched off. A guardrail that asks a model is another role than the agent that it guards.
    return data.name if isinstance(data, AgentSpanData | GuardrailSpanData) else None


def _id(span: Span[Any]) -> str | None:
    return span.span_id if span.span_id != _UNTRACED else None
