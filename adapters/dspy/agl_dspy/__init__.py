"""agl's adapter for DSPy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import agl_core
from agl_core.capture import AgentRun, ToolRun, current_attempt, current_identity, report_problem, watch, wrap_once
from agl_core.capture.marking import open_runs
from agl_core.capture.requests import Stamper, goes_to_the_server

_ANSWERS = ("finish", "submit")
"""How `ReAct` and `ReActV2` name the tool that ends a run."""
_CLIENT = "dspy._vendor.lm15.transports"
"""The HTTP client that DSPy brings since 3.4; DSPy before that sends through libraries that agl knows."""


@agl_core.adapter("dspy")
def dspy() -> None:
    """DSPy: the names of modules, and the results of tools. In a rollout, DSPy's cache is off."""
    from dspy import Module, Tool, ToolCalls
    from dspy.clients.cache import Cache

    for name in ("__call__", "acall"):
        watch(Module, name, _module_run)
        watch(Tool, name, _called)
    if hasattr(ToolCalls.ToolCall, "execute"):
        watch(ToolCalls.ToolCall, "execute", _executed)
    for name in ("get", "put"):
        wrap_once(Cache, name, _off_in_rollouts)
    with suppress(ModuleNotFoundError):
        watch(import_module(f"{_CLIENT}._sync").StdlibTransport, "stream", _sending)
        watch(import_module(f"{_CLIENT}._async").StdlibAsyncTransport, "_do_stream", _sending)


def _module_run(module: Any, *_: Any, **__: Any) -> AgentRun | None:
    """One run of a module. Parts of DSPy's own modules, such as a `ReAct`'s predictors, are no agents.

    A module of the user's own runs the tools that its predictors ask for.
    """
    around = next(open_runs("dspy"), None)
    outer = around.of if isinstance(around, AgentRun) else None
    if _is_dspys(module) and _is_dspys(outer):
        return None
    return AgentRun(_name_of(module), "dspy", only_calls=outer is not None and _is_dspys(module), of=module)


def _is_dspys(module: Any) -> bool:
    return type(module).__module__.partition(".")[0] == "dspy"


def _name_of(module: Any) -> str:
    """Its place in the program, as `named_predictors` has it; else the name of the code around it, else its class's."""
    try:
        path = _path_of(module)
    except Exception as error:
        report_problem(f"Naming {type(module).__name__}", error)
        path = None
    around = current_identity()
    return path or (around and around.agent) or type(module).__name__


def _path_of(module: Any) -> str | None:
    """The attributes that lead to it from the outermost module of the user's own that runs and has it."""
    for outer in sys.modules["dspy"].settings.caller_modules or ():
        if not _is_dspys(outer) and outer is not module:
            for name, inner in outer.named_sub_modules():
                if inner is module:
                    return str(name).removeprefix("self.")
    return None


class _ExecutedCall(ToolRun):
    """A tool call that the user's code executes; DSPy wraps the tool's exception."""

    def end(self, error: BaseException | None) -> None:
        super().end((error and error.__cause__) or error)


def _called(tool: Any, **arguments: Any) -> ToolRun:
    # DSPy tells a tool no id: it belongs to the call before it.
    return ToolRun(tool.name, None, arguments, "dspy", only_failures=tool.name in _ANSWERS)


def _executed(call: Any, *_: Any, **__: Any) -> ToolRun:
    id = getattr(call, "id", None)
    return _ExecutedCall(call.name, id, call.args or {}, "dspy", only_failures=call.name in _ANSWERS)


def _off_in_rollouts(method: Callable[..., Any]) -> Callable[..., Any]:
    """The cache must not answer there: each rollout samples its own replies."""
    return lambda *args, **kwargs: method(*args, **kwargs) if current_attempt() is None else None


@contextmanager
def _sending(_: Any, request: Any) -> Iterator[None]:
    """One request, with the headers of its rollout if it goes to the server; it lasts until the head of the reply."""
    if not goes_to_the_server(request.url):
        yield
        return
    headers = {name.lower(): value for name, value in request.headers}
    with Stamper().stamped(request.method, headers):
        request.headers = list(headers.items())
        yield
