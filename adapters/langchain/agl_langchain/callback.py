"""The callback handler: callers and tool results from LangChain's events."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.outputs import LLMResult
from langchain_core.tracers.context import register_configure_hook

import agl_core
from agl_core.apis.alone import LocalRollout, LocalRollouts
from agl_core.capture import (
    AttemptContext,
    BoundedDict,
    Identity,
    IdentityScope,
    Outcome,
    current_attempt,
    describe_error,
    enter_identity,
    guarded,
    jsonable,
    message_status,
    record_tool_result,
    status_of,
)
from agl_core.types import Json, Task

_NO_NAME = "LangGraph"
"""The name of a graph that was given none."""


@dataclass(slots=True)
class _Run:
    """A chain, call or tool between its start and its end event."""

    id: UUID
    parent: UUID | None
    attempt: AttemptContext
    begun: LocalRollout | None = None
    """The agent's run that begins and ends with this one, if the adapter is used alone."""
    agent: str | None = None
    name: str | None = None
    """LangChain's: the graph's or the node's."""
    lc_agent_name: Json = None
    """From the metadata, which inner runs inherit."""
    inside: str | None = None
    """The named agent around it."""
    started: float = field(default_factory=time.time)
    scope: IdentityScope | None = None
    tool: str = ""
    tool_call_id: str | None = None
    arguments: Any = None

    @property
    def span(self) -> str:
        return str(self.id)

    @property
    def who(self) -> Identity:
        return Identity(self.agent, self.span, str(self.parent) if self.parent else None)


class _Handler(BaseCallbackHandler):
    """Reports callers and tool results to the running attempt, or alone to an attempt of its own."""

    # A sync handler that runs inline is the only kind whose context variables reach the HTTP request.
    run_inline = True

    def __init__(self, alone: LocalRollouts | None = None) -> None:
        self._alone = alone
        self._runs: BoundedDict[UUID, _Run] = BoundedDict()
        self._lock = threading.Lock()

    @guarded
    def on_chain_start(self, serialized: Any, inputs: Any, **event: Any) -> None:
        run = self._start(event, inputs)
        if run and (run.agent or run.begun):
            # For what a node does without LangChain: an OpenAI client called directly, say.
            who, variables = Identity(run.agent, parent_span=run.span), _channels(event, inputs)
            run.scope = enter_identity(who, variables=variables, attempt=run.attempt)

    @guarded
    def on_llm_start(self, serialized: Any, prompts: Any, **event: Any) -> None:
        run = self._start(event, prompts[0])
        if run:
            run.scope = enter_identity(run.who, attempt=run.attempt)
            run.agent = run.scope.identity.agent

    # LangChain passes these by place: only their names differ.
    on_chat_model_start = on_llm_start  # type: ignore[assignment]

    @guarded
    def on_tool_start(self, serialized: Any, input_str: str, **event: Any) -> None:
        run = self._start(event, input_str)
        if run:
            run.tool = (serialized or {}).get("name") or event.get("name") or "tool"
            run.tool_call_id = event.get("tool_call_id")
            run.arguments = input_str if event.get("inputs") is None else event["inputs"]

    @guarded
    def on_chain_end(self, outputs: Any, **event: Any) -> None:
        self._end(event, outputs)

    on_tool_end = on_chain_end  # type: ignore[assignment]

    @guarded
    def on_llm_end(self, response: LLMResult, **event: Any) -> None:
        self._end(event, [reply.text for replies in response.generations for reply in replies])

    @guarded
    def on_llm_error(self, error: BaseException, **event: Any) -> None:
        self._end(event, error=error)

    on_chain_error = on_tool_error = on_llm_error

    def _start(self, event: Mapping[str, Any], inputs: Any) -> _Run | None:
        run_id, parent_id = event["run_id"], event.get("parent_run_id")
        parent, begun = self._run(parent_id), None
        attempt = current_attempt() or (parent.attempt if parent else None)
        if attempt is None and self._alone:
            begun = self._alone.begin(str(run_id), inputs)
            attempt = begun.attempt
        if attempt is None:
            return None
        run = _Run(run_id, parent_id, attempt, begun, name=event.get("name"))
        self._name(run, parent, event.get("metadata") or {})
        with self._lock:
            self._runs[run_id] = run
        return run

    def _run(self, id: UUID | None) -> _Run | None:
        with self._lock:
            return self._runs.get(id) if id else None

    def _name(self, run: _Run, parent: _Run | None, metadata: Mapping[str, Any]) -> None:
        """The agent of a run: the innermost named one around it, else its graph node."""
        node, around = metadata.get("langgraph_node"), _nodes_around(metadata)
        run.lc_agent_name = metadata.get("lc_agent_name")
        run.inside = parent.inside if parent else None
        if run.lc_agent_name and (parent is None or run.lc_agent_name != parent.lc_agent_name):
            run.inside = str(run.lc_agent_name)
        graph = self._react_agent(run, parent)
        if graph and parent:
            named = graph.name if graph.name != _NO_NAME else None
            run.inside = parent.inside = graph.inside = named or run.inside or next(around, None)
        # All calls of `create_agent` are made in a node named "model": if it has no name, the node that holds it has.
        unnamed = next(around, node) if node == "model" else node
        run.agent = run.inside or (str(unnamed) if unnamed else None)

    def _react_agent(self, run: _Run, parent: _Run | None) -> _Run | None:
        """The run of `create_react_agent` around this part of it, which only the part's name shows."""
        if run.name == "pre_model_hook":
            return parent
        is_call = run.name == "call_model" and parent is not None and parent.name == "agent"
        return self._run(parent.parent) if parent and is_call else None

    def _end(self, event: Mapping[str, Any], result: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            run = self._runs.pop(event["run_id"], None)
        if run is None:
            return
        if run.scope:
            run.scope.close()
        if run.tool and not (error and _is_control_flow(error)):
            decided: Outcome | None = None
            if error is None:
                result, decided = _outcome(result, run.tool_call_id)
            record_tool_result(
                run.span,
                run.tool,
                result if error is None else error,
                run.who,
                decided=decided,
                tool_call_id=run.tool_call_id,
                arguments=run.arguments,
                started=run.started,
                adapter="langchain",
                recording=run.attempt.recording,
            )
        if run.begun:
            run.begun.finish(_answer(result), describe_error(error) if error else None)


class AglCallback(_Handler, LocalRollouts):
    """Pass it in the config of an agent that you already have:

        agent.invoke({"messages": [...]}, {"callbacks": [AglCallback()]})

    In a rollout it reports callers and tool results. Outside any rollout, with no server and any endpoint, it keeps the
    latest `keep` runs of the agent; `episodes` and `transitions` give them as data. Reward rules find the expected
    answer in the `task`, which may be set anew between runs; runs of one task are a group:

        AglCallback(task=agl_core.Task("sum", "1 + 2?", metadata={"answer": 3}))
    """

    def __init__(self, keep: int = 1000, task: Task | None = None) -> None:
        _Handler.__init__(self, self)
        LocalRollouts.__init__(self, keep, task)
        # The agent's name travels with the call's request; alone, the call is recorded there.
        agl_core.attach([])


@functools.cache
def attach() -> None:
    """Give every LangChain and LangGraph agent of this process a handler, which does nothing outside rollouts.

    It reaches sync, async and batch calls and bare threads. An agent with an `AglCallback` too is seen once.
    """
    # The default is there in every context, also in that of a thread which inherited none.
    handler: ContextVar[_Handler | None] = ContextVar("agl_langchain", default=_Handler())  # noqa: B039
    register_configure_hook(handler, True, _Handler)


def _answer(outputs: Any) -> Any:
    """An agent's answer: the text of its last message, or its structured response, instead of its whole state."""
    if not isinstance(outputs, Mapping):
        return outputs
    if outputs.get("structured_response") is not None:
        return outputs["structured_response"]
    messages = outputs.get("messages")
    return messages[-1].text if messages and isinstance(messages[-1], BaseMessage) else outputs


def _nodes_around(metadata: Mapping[str, Any]) -> Iterator[str]:
    """The graph nodes around this one, innermost first: of "alice:<uuid>|model:<uuid>", alice."""
    namespaces = str(metadata.get("langgraph_checkpoint_ns") or "").split("|")[-2::-1]
    return (namespace.partition(":")[0] for namespace in namespaces)


def _channels(event: Mapping[str, Any], state: Any) -> dict[str, Json] | None:
    """A LangGraph node's input channels without the messages, which are in the calls' prompts."""
    if not any(str(tag).startswith("graph:step:") for tag in event.get("tags") or ()):
        return None
    values = state if isinstance(state, Mapping) else getattr(state, "__dict__", {})
    return {str(name): jsonable(value) for name, value in values.items() if name != "messages"}


def _is_control_flow(error: BaseException) -> bool:
    """LangGraph raises interrupts and handoffs (`Command(graph=PARENT)`) through nodes and tools."""
    return any(kind.__name__ == "GraphBubbleUp" for kind in type(error).__mro__)


def _outcome(output: Any, tool_call_id: str | None) -> tuple[Any, Outcome]:
    """The result in a ToolMessage, in a Command that holds one, or in what the tool returned; and its status."""
    message = next((m for m in _tool_messages(output) if m.tool_call_id == tool_call_id), None)
    if message is None:
        return output, status_of(output)
    return message.content, message_status(message.content, _reported(message))


def _reported(message: ToolMessage) -> str | None:
    """The status of a message: a failure, or a success that the tool's author set."""
    # In its own messages about what a tool returned, LangChain sets status and artifact.
    by_author = "status" in message.model_fields_set and "artifact" not in message.model_fields_set
    return message.status if message.status == "error" or by_author else None


def _tool_messages(output: Any) -> Iterator[ToolMessage]:
    if isinstance(output, ToolMessage):
        yield output
    elif isinstance(output, Mapping):
        yield from _tool_messages(output.get("messages"))
    elif isinstance(output, list | tuple):
        for item in output:
            yield from _tool_messages(item)
    elif type(output).__name__ == "Command":  # LangGraph's; it need not be installed
        yield from _tool_messages(getattr(output, "update", None))
