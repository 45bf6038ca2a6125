"""agl's adapter for smolagents: who makes a call, and what tools, managed agents and code did, seen where they run.

smolagents tells a tool neither which tool call it answers nor what becomes of its exception, and its step callbacks see
a step as a whole. So a tool call's name carries its id from the model's message to the tool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import agl_core
from agl_core.capture import AgentRun, ToolRun, current_identity, guarded, status_of, watch, wrap_once
from agl_core.capture.marking import open_runs
from agl_core.capture.watching import watched

_ANSWER, _CODE = "final_answer", "python_interpreter"
"""How smolagents names the tool that ends a run, and the tool call that code is."""
_REPORTED = "_agl_reported"
"""Marks what a tool raised."""


@agl_core.adapter("smolagents")
def smolagents() -> None:
    """smolagents: agent names, and the results of tools, managed agents and code."""
    from smolagents import LocalPythonExecutor, MultiStepAgent, ToolCallingAgent

    watch(MultiStepAgent, "run", _agent_run, streams=True)
    # The message may have come from the model's API, or its tool calls were read in its text.
    watch(ToolCallingAgent, "process_tool_calls", lambda _, message, *__, **___: _name_calls(message))
    watch(ToolCallingAgent, "execute_tool_call", _tool_run)
    wrap_once(LocalPythonExecutor, "send_tools", _watching_tools)


def _agent_run(agent: Any, *_: Any, **__: Any) -> AgentRun:
    _watch_parts(agent)
    around = current_identity()
    # smolagents' own name is that of the class.
    return AgentRun(str(agent.name or (around and around.agent) or type(agent).__name__))


@guarded
def _watch_parts(agent: Any) -> None:
    """The classes of an agent's model and executor may be the user's own."""
    if hasattr(agent.model, "parse_tool_calls"):
        watch(type(agent.model), "parse_tool_calls", _calls_read)
    if hasattr(agent, "python_executor"):
        watch(type(agent.python_executor), "__call__", _code_run)


class _ToolName(str):
    """A tool's name in a tool call, with the id of that call."""

    tool_call_id: str | None


@contextlib.contextmanager
def _calls_read(_: Any, message: Any, *__: Any, **___: Any) -> Iterator[None]:
    """Tool calls that are read in a text have ids of smolagents' own, which no reply has."""
    has_calls = bool(message.tool_calls)
    yield
    if not has_calls:
        _name_calls(message, are_in_reply=False)


@guarded
def _name_calls(message: Any, *, are_in_reply: bool = True) -> None:
    for tool_call in message.tool_calls or ():
        if not isinstance(tool_call.function.name, _ToolName):
            tool_call.function.name = _ToolName(tool_call.function.name)
            tool_call.function.name.tool_call_id = tool_call.id if are_in_reply else None


class _ToolRun(ToolRun):
    """An answer ends the agent's run, and is reported only if it failed."""

    def __init__(self, name: str, id: str | None, arguments: Any) -> None:
        super().__init__(str(name), id, arguments or {}, "smolagents", only_failures=name == _ANSWER)

    def end(self, error: BaseException | None) -> None:
        super().end(error)
        if error is not None:
            with contextlib.suppress(AttributeError):
                setattr(error, _REPORTED, True)


def _tool_run(_: Any, tool_name: str, arguments: Any, *__: Any, **___: Any) -> ToolRun:
    """A tool or managed agent of a `ToolCallingAgent`, also one that does not exist, or gets the wrong arguments."""
    return _ToolRun(tool_name, getattr(tool_name, "tool_call_id", None), arguments)


def _watching_tools(send: Callable[..., Any]) -> Callable[..., Any]:
    """The tools and managed agents that code may call."""

    def watched_tool(name: str, tool: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> ToolRun:
            names = [*(getattr(tool, "inputs", None) or {}), *map(str, range(len(args)))]
            return _ToolRun(name, None, {**dict(zip(names, args, strict=False)), **kwargs})

        return watched(tool, run)

    def send_watched(executor: Any, tools: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return send(executor, {name: watched_tool(name, tool) for name, tool in tools.items()}, *args, **kwargs)

    return send_watched


class _Code(ToolRun):
    """The code of a `CodeAgent`: what it calls are tools of the model's reply too."""

    @guarded
    def end(self, error: BaseException | None) -> None:
        if _is_reported(error):
            self.only_failures, error = True, None
        elif error is not None:
            self.decided = status_of(error.__context__ or error)  # Its executor words what the code raised.
        else:
            result = self.result
            output, logs, *_ = result if isinstance(result, tuple) else (result.output, result.logs)
            printed = {"logs": str(logs), "output": output}
            self.result = {name: value for name, value in printed.items() if value not in (None, "")}
        super().end(error)


def _code_run(executor: Any, code: str, *_: Any, **__: Any) -> ToolRun | None:
    # A method of an executor's class may call that of the class that it derives from.
    is_running = any(run.of is executor for run in open_runs("smolagents"))
    return None if is_running else _Code(_CODE, None, code, "smolagents", is_code=True, of=executor)


def _is_reported(error: BaseException | None) -> bool:
    """True if a tool raised it, and the code has let it through."""
    return error is not None and (hasattr(error, _REPORTED) or _is_reported(error.__cause__ or error.__context__))
