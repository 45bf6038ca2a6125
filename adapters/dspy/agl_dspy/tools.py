"""What tools did, seen where DSPy runs them. DSPy tells a tool no id: it belongs to the call before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dspy

from agl_core.capture import current_attempt
from agl_core.capture.attach.methods import wrap_once
from agl_core.capture.context import holding
from agl_core.capture.marking import ToolRun
from agl_dspy.modules import running

_ADAPTER = "dspy"
_ANSWERS = ("finish", "submit")
"""How `ReAct` and `ReActV2` name the tool that ends a run."""


def watch_tools() -> None:
    """Wrap what tools are run with; calling it again changes nothing."""
    wrap_once(dspy.Tool, "__call__", _seen)
    wrap_once(dspy.Tool, "acall", _seen_async)
    if hasattr(dspy.ToolCalls.ToolCall, "execute"):
        wrap_once(dspy.ToolCalls.ToolCall, "execute", _seen_execute)


def _seen(call: Callable[..., Any]) -> Callable[..., Any]:
    def seen_call(tool: dspy.Tool, **arguments: Any) -> Any:
        with _run_of(tool.name, None, arguments) as run:
            run.result = call(tool, **arguments)
        return run.result

    return seen_call


def _seen_async(call: Callable[..., Any]) -> Callable[..., Any]:
    async def seen_call(tool: dspy.Tool, **arguments: Any) -> Any:
        with _run_of(tool.name, None, arguments) as run:
            run.result = await call(tool, **arguments)
        return run.result

    return seen_call


def _seen_execute(execute: Callable[..., Any]) -> Callable[..., Any]:
    """A tool call that the user's own code executes."""

    def seen_execute(tool_call: Any, *args: Any, **kwargs: Any) -> Any:
        id = getattr(tool_call, "id", None)
        with _run_of(tool_call.name, id, tool_call.args, is_wrapped=True) as run:
            run.result = execute(tool_call, *args, **kwargs)
        return run.result

    return seen_execute


@contextmanager
def _run_of(tool: str, id: str | None, arguments: Any, *, is_wrapped: bool = False) -> Iterator[ToolRun]:
    """One run of a tool. An answer ends the module's run, and is reported only if it failed.

    If what the tool raises `is_wrapped` in an error of DSPy's, its cause is reported.
    """
    run = ToolRun(tool, id, arguments or {}, adapter=_ADAPTER)
    if current_attempt() is None:
        yield run
        return
    run.start(dict)
    try:
        with holding(running, None):
            yield run
    except BaseException as error:
        run.end((error.__cause__ if is_wrapped else None) or error)
        raise
    run.end(None, is_reported=tool not in _ANSWERS)
