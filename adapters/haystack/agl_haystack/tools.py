"""What the tools of an agent did, seen where Haystack makes messages of it.

Haystack's span of a tool has neither the id of the tool call nor the exception. So two of its inner functions are
wrapped: the one that makes a message of a result, and the one that looks tools up.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable
from typing import Any

from haystack.components.agents import tool_calling

from agl_core.capture import (
    current_attempt,
    current_identity,
    guarded,
    message_status,
    report_problem,
    tool_result_report,
)
from agl_core.capture.attach.methods import wrap_once
from agl_core.types import Identity


@functools.cache
def attach() -> None:
    """Watch the tools of Haystack's agents. What another version of Haystack does not have is reported as a problem."""
    for name, wrap in (("_finalize_tool_result", _sees_results), ("_resolve_tool_calls", _sees_unknown_tools)):
        try:
            wrap_once(tool_calling, name, wrap)
        except AttributeError as error:
            report_problem(f"Watching {name} of Haystack's agents", error)


def _sees_results(finalize: Callable[..., Any]) -> Callable[..., Any]:
    """Where a result, or the exception that a tool raised, becomes a message for the model."""

    def finalize_seen(result: Any, tool_call: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            message = finalize(result, tool_call, *args, **kwargs)
        except Exception as error:
            _report(tool_call, error)
            raise
        _report(tool_call, result if isinstance(result, Exception) else message)
        return message

    return finalize_seen


def _sees_unknown_tools(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Where a tool call of a tool that does not exist is answered."""

    def resolve_seen(messages: Any, tools: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            resolved = resolve(messages, tools, *args, **kwargs)
        except tool_calling.ToolNotFoundException as error:
            asked = (each for message in messages for each in message.tool_calls)
            _report(next((each for each in asked if each.tool_name not in tools), None), error)
            raise
        for message in resolved[-1]:
            _report(message.tool_call_results[0].origin, message)
        return resolved

    return resolve_seen


@guarded
def _report(tool_call: Any, result: Any) -> None:
    """Report an exception, or the message with what the model reads."""
    active, decided = current_attempt(), None
    if active is None:
        return
    if not isinstance(result, Exception):
        said = result.tool_call_results[0]
        result = said.result if isinstance(said.result, str) else [each.to_dict() for each in said.result]
        decided = message_status(result, "error" if said.error else None)
    who = current_identity() or Identity()
    report = tool_result_report(
        uuid.uuid4().hex,
        tool_call.tool_name,
        result,
        decided=decided,
        # The Responses API has ids of its items besides.
        tool_call_id=(tool_call.extra or {}).get("call_id") or tool_call.id,
        arguments=tool_call.arguments,
        agent=who.agent,
        parent_span=who.parent_span,
        ended=time.time(),
        adapter="haystack",
    )
    active.recording.tool_result(report)
