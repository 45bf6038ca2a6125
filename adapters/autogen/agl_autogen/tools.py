"""What the tools did: with or without a workbench, whether they returned, raised or do not exist."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from autogen_core.models import FunctionExecutionResult
from autogen_core.tools import BaseTool, ToolResult, Workbench

from agl_core.capture import (
    Decided,
    Identity,
    Recording,
    current_attempt,
    current_identity,
    guarded,
    message_status,
    report_answer,
    tool_result_report,
)
from agl_core.capture.attach.methods import Arguments, Watch, argument, watch
from agl_core.capture.context import holding


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
        """What the tool raised. A workbench makes text of it, so the tool's run passes it to that of its workbench."""

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
        """Whether `inner` is the same run: a workbench's tool, or the base class of a tool that overrides it."""
        return inner._id == self._id and (inner._runner is self._runner or isinstance(self._runner, Workbench))

    def _report(self, result: Any, decided: Decided | None = None) -> None:
        caller = self._caller or Identity()
        around = self._outer._span if self._outer else caller.parent_span
        report = tool_result_report(
            self._span,
            self._tool,
            result,
            decided=decided,
            tool_call_id=self._id,
            arguments=self._arguments,
            agent=caller.agent,
            span=self._span,
            parent_span=around,
            started=self._started,
            ended=time.time(),
            adapter="autogen",
        )
        self._recording.tool_result(report, {caller.parent_span or ""})


_running: ContextVar[_ToolRun | None] = ContextVar("agl_autogen_tool", default=None)


@functools.cache
def attach() -> None:
    """Watch every tool and every workbench."""
    watch(Workbench, ("call_tool", "call_tool_stream"), _in_workbench)
    watch(BaseTool, ("run_json", "run_json_stream"), _by_itself)


def answered(recording: Recording, results: Sequence[FunctionExecutionResult]) -> None:
    """Report the tool calls that an agent answered itself: no such tool, arguments that are no JSON."""
    for result in results:
        decided = message_status(result.content, "error" if result.is_error else None)
        report_answer(recording, "autogen", result.call_id, result.content, decided)


def _in_workbench(workbench: Workbench, arguments: Arguments) -> Watch | None:
    active, id = current_attempt(), argument(arguments, 3, "call_id") or None
    name, given = argument(arguments, 0, "name"), argument(arguments, 1, "arguments")
    return _ToolRun(active.recording, workbench, name, given, id) if active else None


def _by_itself(tool: BaseTool[Any, Any], arguments: Arguments) -> Watch | None:
    active, id = current_attempt(), argument(arguments, 2, "call_id") or None
    return _ToolRun(active.recording, tool, tool.name, argument(arguments, 0, "args"), id) if active else None
