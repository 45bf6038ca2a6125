"""The span handler: callers and tool results from LlamaIndex's spans.

Each run of a workflow, each step of it, and each tool has a span. Agents are workflows: one step asks the model,
another one runs a tool. A span begins and ends in the task of its step: an identity entered there reaches the request.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.agent.workflow import AgentOutput, AgentWorkflow, BaseWorkflowAgent, ToolCall, ToolCallResult
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import BaseTool, ToolOutput
from llama_index.core.workflow import Event, Workflow
from workflows.runtime.types.results import WaitingForEvent

from agl_core.capture import (
    BoundedDict,
    Identity,
    IdentityScope,
    Outcome,
    current_attempt,
    enter_identity,
    guarded,
    message_status,
    record_tool_result,
)
from agl_core.capture.context import Steps, current_scope


@dataclass(slots=True)
class _Span:
    parent: str | None
    scope: IdentityScope
    tool: str | None = None
    """The tool that it runs, if any."""
    arguments: Any = None
    asked_by: Identity | None = None
    """Who asked for the tool; None if the step around it reports it, or a tool called it."""
    tool_call_id: str | None = None
    """None if the reply has no tool call: `ReActAgent` reads its text, and makes up an id."""
    error: Exception | None = None
    """Raised by the tool; the agent makes a text of it."""
    started: float = field(default_factory=time.time)


class _Handler(BaseSpanHandler):  # type: ignore[misc]
    _open: BoundedDict[str, _Span] = PrivateAttr(default_factory=BoundedDict)
    _requests: BoundedDict[tuple[str | None, str], tuple[Identity, str | None]] = PrivateAttr(
        default_factory=BoundedDict
    )
    """Who asked for a tool, and the tool call's id; by the agent's span and LlamaIndex's own id of the call."""

    @guarded
    def new_span(
        self, id_: str, bound_args: Any, instance: Any = None, parent_span_id: str | None = None, **_: Any
    ) -> None:
        if current_attempt() is None:
            return
        id, parent, arguments = id_, parent_span_id, bound_args.arguments
        event = next((value for value in arguments.values() if isinstance(value, Event)), None)
        who, steps = Identity(None, id, id), None
        tool, asked_by, tool_call_id = None, None, None
        if isinstance(event, ToolCall):
            unknown = Identity(None, None, parent), event.tool_id
            asked_by, tool_call_id = self._requests.get((parent, event.tool_id), unknown)
            who, tool, arguments = Identity(asked_by.agent, id, id), event.tool_name, event.tool_kwargs
        elif isinstance(instance, BaseTool):
            asked_by, tool = self._asking_for_a_tool(parent), instance.metadata.get_name()
            arguments = _given(instance, arguments)
        elif name := getattr(event, "current_agent_name", None):
            who = Identity(name, id, id)
        elif isinstance(instance, BaseWorkflowAgent):
            who = Identity(instance.name, id, id)
        elif isinstance(instance, Workflow) and not isinstance(instance, AgentWorkflow):
            # The user's own: its steps call the model and the tools as they like.
            who, steps = Identity(type(instance).__name__, id), Steps()
        else:
            return
        self._open[id] = _Span(parent, enter_identity(who, steps), tool, arguments, asked_by, tool_call_id)

    def _asking_for_a_tool(self, parent: str | None) -> Identity | None:
        """Who asks for a tool that runs outside an agent's steps; None if it runs inside a tool or such a step."""
        around = self._open.get(parent or "")
        if around is not None and around.tool is not None:
            return None
        scope = current_scope()
        who = scope.identity if scope else Identity()
        return Identity(who.agent, None, scope.steps.span() if scope and scope.steps else who.parent_span)

    @guarded
    def prepare_to_exit_span(self, id_: str, *_: Any, result: Any = None, err: Any = None, **__: Any) -> None:
        id, result = id_, result if err is None else err
        span = self._open.pop(id, None)
        if span is None:
            return
        span.scope.close()
        if span.tool is not None:
            self._tool_ended(id, span, span.tool, result)
        elif isinstance(result, AgentOutput):
            in_reply = _tool_call_ids(result.response)
            for call in result.tool_calls:
                known = call.tool_id if call.tool_id in in_reply else None
                self._requests[span.parent, call.tool_id] = Identity(span.scope.identity.agent, None, id), known

    prepare_to_drop_span = prepare_to_exit_span

    def _tool_ended(self, id: str, span: _Span, tool: str, result: Any) -> None:
        around = self._open.get(span.parent or "")
        if around is not None and around.tool == tool:
            around.error = result if isinstance(result, Exception) else None
        output = result.tool_output if isinstance(result, ToolCallResult) else result
        is_over = isinstance(output, ToolOutput | Exception) and not isinstance(output, WaitingForEvent)
        if span.asked_by is None or not is_over:
            return  # it was cancelled, or waits for a person and will run again
        text, decided = _said(output, span.error)
        record_tool_result(
            id,
            tool,
            text,
            Identity(span.scope.identity.agent, id, span.asked_by.parent_span),
            decided=decided,
            tool_call_id=span.tool_call_id,
            arguments=span.arguments,
            started=span.started,
            adapter="llama-index",
        )


@functools.cache
def attach() -> None:
    """Give LlamaIndex's dispatcher a handler, which does nothing outside rollouts."""
    get_dispatcher().add_span_handler(_Handler())


def _said(output: ToolOutput | Exception, error: Exception | None) -> tuple[Any, Outcome | None]:
    """The result as the model reads it, or the exception."""
    if error is not None or isinstance(output, Exception):
        return error or output, None
    text = "".join(getattr(block, "text", f"[{block.block_type}]") for block in output.blocks)
    return text, message_status(text, "error" if output.is_error else None)


def _given(tool: BaseTool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a tool by name, as far as it names them."""
    named = dict(arguments.get("kwargs") or {})
    positional = [*(arguments.get("args") or ()), *([arguments["input"]] if "input" in arguments else ())]
    names = (name for name in tool.metadata.get_parameters_dict().get("properties", {}) if name not in named)
    return {**dict(zip(names, positional, strict=False)), **named}


def _tool_call_ids(message: ChatMessage) -> set[str | None]:
    calls = [*message.blocks, *(message.additional_kwargs.get("tool_calls") or ())]
    fields = [call if isinstance(call, Mapping) else getattr(call, "__dict__", {}) for call in calls]
    return {call.get(name) for call in fields for name in ("tool_call_id", "call_id", "id")}
