"""Who speaks, and what the tools did: AgentChat's agents, agents on a runtime, and tools, in a workbench or not."""

from __future__ import annotations

import functools
import time
import uuid
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from autogen_core import AgentId, BaseAgent, SingleThreadedAgentRuntime
from autogen_core.tools import BaseTool, ToolResult, Workbench

from agl_autogen.watching import Arguments, Watch, argument, watch
from agl_core.capture import (
    Decided,
    Identity,
    IdentityScope,
    Recording,
    current_attempt,
    current_identity,
    guarded,
    message_status,
    record_tool_result,
)
from agl_core.capture.context import HERE, Here, holding
from agl_core.capture.reports import wrap_once


class _Turn(Watch):
    """An agent handles messages: the calls made meanwhile, also in tasks that it starts, are its calls."""

    def __init__(self, agent: str, around: Here) -> None:
        scope = IdentityScope(Identity(agent, parent_span=uuid.uuid4().hex), around.scope)
        self._inside = replace(around, scope=scope)

    def applied(self) -> AbstractContextManager[None]:
        return holding(HERE, self._inside)


class _MessageId(str):
    """The id of a message, with the attempt that sent it.

    A runtime handles messages in a task of its own, which may have been started in another attempt.
    """

    sent_by: Here


@functools.cache
def attach() -> None:
    """Watch every tool and workbench, and the agents on runtimes: the user's own, and the managers of teams."""
    watch(BaseAgent, ("on_message",), _handling)
    for name in ("send_message", "publish_message"):
        wrap_once(SingleThreadedAgentRuntime, name, _carrying)
    watch(Workbench, ("call_tool", "call_tool_stream"), _in_workbench)
    watch(BaseTool, ("run_json", "run_json_stream"), _by_itself)


@functools.cache
def attach_agentchat() -> None:
    """Watch what AgentChat's agents do with messages, those of the user's own classes included."""
    from autogen_agentchat.base import ChatAgent

    watch(ChatAgent, ("on_messages", "on_messages_stream"), _speaking)


def name_of(id: AgentId) -> str:
    """The name that the user gave; teams append their own id, which is the key.

    >>> name_of(AgentId("alice_77f1", "77f1")), name_of(AgentId("worker", "default"))
    ('alice', 'worker')
    """
    return id.type.removesuffix(f"_{id.key}")


def _speaking(agent: Any, arguments: Arguments) -> Watch | None:
    here = Here.now()
    return _Turn(agent.name, here) if here.attempt else None


def _handling(agent: BaseAgent, arguments: Arguments) -> Watch | None:
    here, message_id = Here.now(), getattr(argument(arguments, 1, "ctx"), "message_id", None)
    around = message_id.sent_by if isinstance(message_id, _MessageId) else here
    return _Turn(name_of(agent.id), around) if around.attempt or here.attempt else None


def _carrying(send: Any) -> Any:
    async def carrying(self: Any, *args: Any, message_id: str | None = None, **kwargs: Any) -> Any:
        carried = _MessageId(uuid.uuid4() if message_id is None else message_id)
        carried.sent_by = Here.now()
        return await send(self, *args, message_id=carried, **kwargs)

    return carrying


class _ToolRun(Watch):
    """A tool runs, by itself or in a workbench."""

    def __init__(
        self, recording: Recording, runner: BaseTool[Any, Any] | Workbench, tool: str, arguments: Any, id: str | None
    ) -> None:
        self._recording, self._runner, self._tool, self._arguments, self._id = recording, runner, tool, arguments, id
        self._caller = current_identity()
        self._span, self._started = uuid.uuid4().hex, time.time()
        around = _running.get()
        self._outer = around if around and around._caller is self._caller else None
        self._result: Any = None
        self._raised: Exception | None = None
        """The tool's exception. A workbench makes text of it, so the tool's run passes it to that of its workbench."""

    def applied(self) -> AbstractContextManager[None]:
        return holding(_running, self)

    def item(self, item: Any) -> None:
        self._result = item

    @guarded
    def closed(self, error: Exception | None) -> None:
        error = error or self._raised
        if self._outer and self._outer._runs(self):
            self._outer._raised = error
        elif error is not None:
            self._report(error)
        elif isinstance(self._runner, BaseTool):
            text = self._runner.return_value_as_string(self._result)
            self._report(text, message_status(text))
        elif isinstance(self._result, ToolResult):
            text = self._result.to_text(replace_image="[image]")
            self._report(text, message_status(text, "error" if self._result.is_error else None))

    def _runs(self, inner: _ToolRun) -> bool:
        """True if `inner` is the same run: a workbench's tool, or the base class of a tool that overrides it."""
        return inner._id == self._id and (inner._runner is self._runner or isinstance(self._runner, Workbench))

    def _report(self, result: Any, decided: Decided | None = None) -> None:
        caller = self._caller or Identity()
        around = self._outer._span if self._outer else caller.parent_span
        record_tool_result(
            self._span,
            self._tool,
            result,
            Identity(caller.agent, self._span, around),
            decided=decided,
            tool_call_id=self._id,
            arguments=self._arguments,
            started=self._started,
            adapter="autogen",
            recording=self._recording,
        )


_running: ContextVar[_ToolRun | None] = ContextVar("agl_autogen_tool", default=None)


def _in_workbench(workbench: Workbench, arguments: Arguments) -> Watch | None:
    active, id = current_attempt(), argument(arguments, 3, "call_id") or None
    tool, tool_arguments = argument(arguments, 0, "name"), argument(arguments, 1, "arguments")
    return _ToolRun(active.recording, workbench, tool, tool_arguments, id) if active else None


def _by_itself(tool: BaseTool[Any, Any], arguments: Arguments) -> Watch | None:
    active, id = current_attempt(), argument(arguments, 2, "call_id") or None
    return _ToolRun(active.recording, tool, tool.name, argument(arguments, 0, "args"), id) if active else None
