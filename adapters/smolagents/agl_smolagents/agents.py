"""smolagents' agents: who makes a call, and what tools, managed agents and code did, seen where smolagents runs them.

smolagents tells a tool neither which tool call it answers nor what becomes of its exception, and its step callbacks see
a step as a whole. So a tool call's name carries its id from the model's message to the tool.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from contextvars import ContextVar
from typing import Any, TypeAlias

from smolagents import LocalPythonExecutor, MultiStepAgent, ToolCallingAgent

from agl_core.capture import (
    Identity,
    current_attempt,
    current_identity,
    guarded,
    record_tool_result,
    report_problem,
    status_of,
)
from agl_core.capture.context import current_scope, holding
from agl_core.capture.marking import AgentRun, ToolRun, started
from agl_core.capture.reports import wrap_once

_Function: TypeAlias = Callable[..., Any]

_ADAPTER = "smolagents"
_ANSWER = "final_answer"
"""How smolagents names the tool that ends a run."""
_CODE = "python_interpreter"
"""How smolagents names the tool call that code is."""
_REPORTED = "_agl_reported"
"""Marks what a tool raised."""

_executing: ContextVar[Any] = ContextVar("agl_smolagents_executor", default=None)
"""The executor that runs code in this context: its class and the one that it derives from may both be watched."""


class _ToolName(str):
    """A tool's name in a tool call, with the id of that call."""

    tool_call_id: str | None


def watch() -> None:
    """Wrap what runs agents and tools; calling it again changes nothing."""
    wrap_once(MultiStepAgent, "run", _named)
    wrap_once(ToolCallingAgent, "process_tool_calls", _naming_calls)
    wrap_once(ToolCallingAgent, "execute_tool_call", _sees_tool)
    wrap_once(LocalPythonExecutor, "send_tools", _sees_tools_of_code)


def _named(run: _Function) -> _Function:
    def named_run(agent: MultiStepAgent, *args: Any, **kwargs: Any) -> Any:
        if current_attempt() is None:
            return run(agent, *args, **kwargs)
        try:
            _watch_parts(agent)
        except Exception as error:
            report_problem(f"Watching the model and the executor of {agent!r}", error)
        # A stream's agent goes on between two items; what it sets there must not reach the code that reads it.
        context = contextvars.copy_context()
        here = AgentRun(_name_of(agent))
        context.run(here.start, lambda: None)
        try:
            result = context.run(run, agent, *args, **kwargs)
        except BaseException as error:
            context.run(here.end, error)
            raise
        if isinstance(result, Generator):
            return _items(result, context, here)
        context.run(here.end, None)
        return result

    return named_run


def _items(source: Generator[Any, Any, Any], context: contextvars.Context, here: AgentRun) -> Generator[Any, Any, Any]:
    try:
        while True:
            try:
                item = context.run(next, source)
            except StopIteration as end:
                return end.value
            yield item
    finally:
        context.run(source.close)
        context.run(here.end, None)


def _name_of(agent: MultiStepAgent) -> str:
    """The name that the user gave; else that of the code around it; else smolagents' own, the name of its class."""
    around = current_identity()
    return str(agent.name or (around and around.agent) or type(agent).__name__)


def _watch_parts(agent: MultiStepAgent) -> None:
    """Wrap the methods of an agent's model and executor, whose classes may be the user's own."""
    if hasattr(agent.model, "parse_tool_calls"):
        wrap_once(type(agent.model), "parse_tool_calls", _naming_calls_in_text)
    if hasattr(agent, "python_executor"):
        wrap_once(type(agent.python_executor), "__call__", _sees_code)


def _naming_calls(process: _Function) -> _Function:
    """The message may have come from the model's API, or its tool calls were read in its text."""

    def process_named(agent: Any, chat_message: Any, *args: Any, **kwargs: Any) -> Any:
        if current_attempt() is not None:
            _name_calls(chat_message, lambda tool_call: tool_call.id)
        return process(agent, chat_message, *args, **kwargs)

    return process_named


def _naming_calls_in_text(parse: _Function) -> _Function:
    """Tool calls that are read in a text have ids of smolagents' own, which no reply has."""

    def parse_named(model: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
        has_calls = bool(message.tool_calls)
        parsed = parse(model, message, *args, **kwargs)
        if not has_calls and current_attempt() is not None:
            _name_calls(parsed, lambda tool_call: None)
        return parsed

    return parse_named


@guarded
def _name_calls(message: Any, id_of: Callable[[Any], str | None]) -> None:
    for tool_call in message.tool_calls or ():
        if not isinstance(tool_call.function.name, _ToolName):
            tool_call.function.name = _ToolName(tool_call.function.name)
            tool_call.function.name.tool_call_id = id_of(tool_call)


def _sees_tool(execute: _Function) -> _Function:
    """A tool or managed agent of a `ToolCallingAgent`, also one that does not exist, or gets the wrong arguments."""

    def execute_seen(agent: Any, tool_name: str, arguments: Any, *args: Any, **kwargs: Any) -> Any:
        def execute_here() -> Any:
            return execute(agent, str(tool_name), arguments, *args, **kwargs)

        return _seen(tool_name, getattr(tool_name, "tool_call_id", None), arguments, execute_here)

    return execute_seen


def _sees_tools_of_code(send: _Function) -> _Function:
    """The tools and managed agents that code may call."""

    def send_seen(executor: Any, tools: Mapping[str, _Function], *args: Any, **kwargs: Any) -> Any:
        return send(executor, {name: _of_code(name, tool) for name, tool in tools.items()}, *args, **kwargs)

    return send_seen


def _of_code(name: str, tool: _Function) -> _Function:
    def called(*args: Any, **kwargs: Any) -> Any:
        return _seen(name, None, _by_name(tool, args, kwargs), lambda: tool(*args, **kwargs))

    # Code may read what a tool says of itself.
    return functools.update_wrapper(called, tool)


def _by_name(tool: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [*(getattr(tool, "inputs", None) or {}), *map(str, range(len(args)))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _seen(tool: str, id: str | None, arguments: Any, call: Callable[[], Any]) -> Any:
    """Call a tool; in an attempt, report what it did. An answer ends the run, and is reported only if it failed."""
    if current_attempt() is None:
        return call()
    with started(ToolRun(str(tool), id, arguments or {}, adapter=_ADAPTER, only_failures=tool == _ANSWER)) as run:
        try:
            run.result = call()
        except BaseException as error:
            with contextlib.suppress(AttributeError):
                setattr(error, _REPORTED, True)
            raise
    return run.result


def _sees_code(execute: _Function) -> _Function:
    """The code of a `CodeAgent`. It is no tool's run: what it calls are tools of the model's reply too."""

    def execute_seen(executor: Any, code: str, *args: Any, **kwargs: Any) -> Any:
        if current_attempt() is None or _executing.get() is executor:
            return execute(executor, code, *args, **kwargs)
        started = time.time()
        try:
            with holding(_executing, executor):
                output = execute(executor, code, *args, **kwargs)
        except Exception as error:
            _report_code(code, error, started)
            raise
        _report_code(code, output, started)
        return output

    return execute_seen


@guarded
def _report_code(code: str, result: Any, started: float) -> None:
    scope, failed = current_scope(), isinstance(result, BaseException)
    if failed and _is_reported(result):
        return
    shown = result if failed else _shown(result)
    record_tool_result(
        uuid.uuid4().hex,
        _CODE,
        shown,
        Identity(scope.identity.agent, None, scope.steps.span() if scope.steps else None) if scope else None,
        # Its executor words what the code raised.
        decided=status_of(result.__context__ or result) if failed else None,
        arguments=code,
        started=started,
        adapter=_ADAPTER,
    )


def _shown(result: Any) -> dict[str, Any]:
    """The text that the code printed, and the value of its last line, where there is any."""
    output, logs, *_ = result if isinstance(result, tuple) else (result.output, result.logs)
    shown = {"logs": str(logs), "output": output}
    return {name: value for name, value in shown.items() if value not in (None, "")}


def _is_reported(error: BaseException | None) -> bool:
    """True if a tool raised it, and the code has let it through."""
    return error is not None and (hasattr(error, _REPORTED) or _is_reported(error.__cause__ or error.__context__))
