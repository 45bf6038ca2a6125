"""Who makes a call: the module of the program, by the name that the program gives it."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import dspy

from agl_core.capture import current_attempt, current_identity, report_problem
from agl_core.capture.attach.methods import wrap_once
from agl_core.capture.marking import AgentRun

running: ContextVar[dspy.Module | None] = ContextVar("agl_dspy_module", default=None)
"""The module that runs in this context; None outside of any, and in a tool."""


def watch_modules() -> None:
    """Wrap `Module.__call__` and `acall`; calling it again changes nothing."""
    wrap_once(dspy.Module, "__call__", _named)
    wrap_once(dspy.Module, "acall", _named_async)


def _named(call: Callable[..., Any]) -> Callable[..., Any]:
    def named_call(module: dspy.Module, *args: Any, **kwargs: Any) -> Any:
        with _run_of(module):
            return call(module, *args, **kwargs)

    return named_call


def _named_async(call: Callable[..., Any]) -> Callable[..., Any]:
    async def named_call(module: dspy.Module, *args: Any, **kwargs: Any) -> Any:
        with _run_of(module):
            return await call(module, *args, **kwargs)

    return named_call


@contextmanager
def _run_of(module: dspy.Module) -> Iterator[None]:
    """One run of a module. What DSPy's own modules are made of, such as the predictors of a `ReAct`, is no agent.

    A module of the user's own runs the tools that its predictors ask for.
    """
    outer = running.get()
    if current_attempt() is None or (_is_dspys(module) and _is_dspys(outer)):
        yield
        return
    run = AgentRun(_name_of(module), only_calls=outer is not None and _is_dspys(module))
    run.start(lambda: None)
    token: contextvars.Token[dspy.Module | None] = running.set(module)
    try:
        yield
    except BaseException as error:
        run.end(error)
        raise
    else:
        run.end(None)
    finally:
        running.reset(token)


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
            for name, each in outer.named_sub_modules():
                if each is module:
                    return str(name).removeprefix("self.")
    return None
