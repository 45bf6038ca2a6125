"""DSPy's programs: who makes a call, what the tools did, and requests and replies that belong to one rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import dspy
from dspy.clients.cache import Cache

from agl_core.capture import current_attempt, current_identity, report_problem
from agl_core.capture.context import holding
from agl_core.capture.marking import AgentRun, ToolRun, started
from agl_core.capture.reports import within, wrap_once
from agl_core.capture.requests import Stamper, goes_to_the_server

_ANSWERS = ("finish", "submit")
"""How `ReAct` and `ReActV2` name the tool that ends a run."""
_CLIENT = "dspy._vendor.lm15.transports"
"""The HTTP client that DSPy brings since 3.4; DSPy before that sends through libraries that agl knows."""

_module: ContextVar[dspy.Module | None] = ContextVar("agl_dspy_module", default=None)
"""The module that runs in this context; None outside of any, and in a tool."""


def watch() -> None:
    """Wrap what runs modules and tools, the cache, and DSPy's HTTP client; calling it again changes nothing."""
    for name in ("__call__", "acall"):
        wrap_once(dspy.Module, name, within(_module_run))
        wrap_once(dspy.Tool, name, within(_called))
    if hasattr(dspy.ToolCalls.ToolCall, "execute"):
        wrap_once(dspy.ToolCalls.ToolCall, "execute", within(_executed))
    for name in ("get", "put"):
        wrap_once(Cache, name, _off_in_rollouts)
    with suppress(ModuleNotFoundError):
        wrap_once(import_module(f"{_CLIENT}._sync").StdlibTransport, "stream", within(_sending))
        wrap_once(import_module(f"{_CLIENT}._async").StdlibAsyncTransport, "_do_stream", within(_sending))


@contextmanager
def _module_run(module: dspy.Module, *_: Any, **__: Any) -> Iterator[None]:
    """One run of a module. What DSPy's own modules are made of, such as the predictors of a `ReAct`, is no agent.

    A module of the user's own runs the tools that its predictors ask for.
    """
    outer = _module.get()
    if current_attempt() is None or (_is_dspys(module) and _is_dspys(outer)):
        yield
        return
    run = AgentRun(_name_of(module), only_calls=outer is not None and _is_dspys(module))
    with started(run), holding(_module, module):
        yield


def _is_dspys(module: dspy.Module | None) -> bool:
    return module is not None and type(module).__module__.partition(".")[0] == "dspy"


def _name_of(module: dspy.Module) -> str:
    """Its place in the program, as `named_predictors` has it; else the name of the code around it, else its class's."""
    try:
        path = _path_of(module)
    except Exception as error:
        report_problem(f"Naming {type(module).__name__}", error)
        path = None
    around = current_identity()
    return path or (around and around.agent) or type(module).__name__


def _path_of(module: dspy.Module) -> str | None:
    """The attributes that lead to it from the outermost module of the user's own that runs and has it."""
    for outer in dspy.settings.caller_modules or ():
        if not _is_dspys(outer) and outer is not module:
            for name, inner in outer.named_sub_modules():
                if inner is module:
                    return str(name).removeprefix("self.")
    return None


@contextmanager
def _tool_run(tool: str, id: str | None, arguments: Any, *, is_wrapped: bool = False) -> Iterator[ToolRun]:
    """One run of a tool. If DSPy puts what it raises into an error of its own, the cause is reported."""
    run = ToolRun(tool, id, arguments or {}, adapter="dspy", only_failures=tool in _ANSWERS)
    run.start(dict)
    try:
        with holding(_module, None):
            yield run
    except BaseException as error:
        run.end((error.__cause__ if is_wrapped else None) or error)
        raise
    run.end(None)


def _called(tool: dspy.Tool, **arguments: Any) -> AbstractContextManager[ToolRun]:
    # DSPy tells a tool no id: it belongs to the call before it.
    return _tool_run(tool.name, None, arguments)


def _executed(tool_call: Any, *_: Any, **__: Any) -> AbstractContextManager[ToolRun]:
    """A tool call that the user's own code executes."""
    return _tool_run(tool_call.name, getattr(tool_call, "id", None), tool_call.args, is_wrapped=True)


def _off_in_rollouts(method: Callable[..., Any]) -> Callable[..., Any]:
    """The cache must not answer there: each rollout samples its own replies."""

    def unless_in_rollout(cache: Cache, *args: Any, **kwargs: Any) -> Any:
        return method(cache, *args, **kwargs) if current_attempt() is None else None

    return unless_in_rollout


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
