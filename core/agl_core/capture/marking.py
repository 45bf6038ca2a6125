"""Agents written from scratch: decorators that mark which code is an agent or a tool."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Generic, TypeVar, overload

from agl_core.capture import context
from agl_core.capture.reports import guarded, record_tool_result, routine_of, within
from agl_core.capture.status import Decided, unknown_status
from agl_core.errors import AgentError
from agl_core.types import Identity

F = TypeVar("F", bound=Callable[..., Any])

_NOT_SET: Any = object()


class AgentRun:
    """One run of an agent. If it `only_calls`, the code around it runs the tools that its calls ask for."""

    def __init__(self, name: str, *, only_calls: bool = False) -> None:
        self.result: Any = None
        self._name, self._only_calls = name, only_calls
        self._scope: context.IdentityScope | None = None
        self._outer: context.Step | None = None

    @guarded
    def start(self, arguments: Callable[[], Any]) -> None:
        around = context.current_scope()
        steps = around.steps if around is not None and self._only_calls else None
        self._outer = context.HERE.get().step
        self._scope = context.enter_identity(Identity(self._name, span=context.new_span()), steps or context.Steps())

    @guarded
    def end(self, error: BaseException | None) -> None:
        if self._scope is not None:
            self._scope.close()
            if not self._only_calls:
                context.move(step=self._outer)


class ToolRun:
    """One run of a tool. In `with agl_core.tool(…) as run`, set `run.result` to what the tool gave."""

    def __init__(
        self,
        tool: str,
        tool_call_id: str | None,
        arguments: Any,
        adapter: str | None = None,
        *,
        only_failures: bool = False,
    ) -> None:
        self.result: Any = _NOT_SET
        self.decided: Decided | None = None
        """Its status, if the framework says more than the result."""
        self.only_failures = only_failures
        """It is recorded only if it failed: it answers in the agent's name, or was cut off."""
        self._tool, self._tool_call_id, self._arguments, self._adapter = tool, tool_call_id, arguments, adapter
        self._agent: str | None = None
        self._parent_span: str | None = None
        self._scope: context.IdentityScope | None = None
        self._outer: context.Step | None = None
        self._started = 0.0

    @guarded
    def start(self, arguments: Callable[[], Any]) -> None:
        if context.current_attempt() is None:
            return
        around = context.current_scope()
        if around is not None:
            step = around.steps.step() if around.steps is not None else None
            self._agent = around.identity.agent if step is None else step.agent
            self._parent_span = around.identity.parent_span if around.steps is None else step.span if step else None
        if self._arguments is None:
            self._arguments = arguments()
        self._outer, self._started = context.HERE.get().step, time.time()
        # Calls that the tool makes are no steps of the agent that runs the tool.
        self._scope = context.enter_identity(Identity(self._agent, span=context.new_span()), context.Steps())

    @guarded
    def end(self, error: BaseException | None) -> None:
        if self._scope is None:
            return
        self._scope.close()
        context.move(step=self._outer)
        if error is None and self.only_failures:
            return
        span = self._scope.identity.span or context.new_span()
        # A block that sets no result may well have had one.
        is_not_set = error is None and self.result is _NOT_SET
        record_tool_result(
            span,
            self._tool,
            error if error is not None else None if is_not_set else self.result,
            Identity(self._agent, span, self._parent_span),
            decided=unknown_status() if is_not_set else self.decided,
            tool_call_id=self._tool_call_id,
            arguments=self._arguments,
            started=self._started,
            adapter=self._adapter,
        )


R = TypeVar("R", bound=AgentRun | ToolRun)

_entered: ContextVar[tuple[tuple[object, Any], ...]] = ContextVar("agl_entered", default=())
"""The markers that this context has entered by `with`, with their runs: concurrent contexts may share a marker."""


class Marker(Generic[R]):
    """A decorator and a context manager, sync and async; each use of it is one run."""

    def __init__(self, word: str, new_run: Callable[[], R]) -> None:
        self._word, self._new_run = word, new_run

    def __enter__(self) -> R:
        run = self._new_run()
        run.start(lambda: None)
        _entered.set((*_entered.get(), (self, run)))
        return run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered = _entered.get()
        for index in reversed(range(len(entered))):
            marker, run = entered[index]
            if marker is self:
                _entered.set(entered[:index] + entered[index + 1 :])
                run.end(error)
                return

    async def __aenter__(self) -> R:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """The function, each call of it one run. AgentError for a generator: it has no clear end."""
        routine = routine_of(function)
        if inspect.isgeneratorfunction(routine) or inspect.isasyncgenfunction(routine):
            raise AgentError(
                f"agl_core.{self._word} cannot mark {_name_of(function)}, which is a generator: "
                f"use `with agl_core.{self._word}(…):` inside it."
            )
        marked = within(lambda *args, **kwargs: started(self._new_run(), lambda: _bound(function, args, kwargs)))
        return functools.update_wrapper(marked(function), function)  # type: ignore[return-value]


@contextmanager
def started(run: R, arguments: Callable[[], Any] = lambda: None) -> Iterator[R]:
    """The run, from its start to its end."""
    run.start(arguments)
    try:
        yield run
    except BaseException as error:
        run.end(error)
        raise
    run.end(None)


def agent(name: str) -> Marker[AgentRun]:
    """The calls made inside are this agent's, and so are its tools: a decorator or a context manager, sync or async.

    Inside, each model call begins a step, and a tool (see `tool`) that runs without a call id belongs to the call of
    its step. Agents nest; concurrent runs, in tasks or threads, are kept apart.

    >>> @agent("writer")
    ... def write(topic):
    ...     return context.current_scope().identity.agent
    >>> write("spring")
    'writer'
    """
    return Marker("agent", lambda: AgentRun(name))


@overload
def tool(tool: F) -> F: ...
@overload
def tool(tool: str, *, tool_call_id: str | None = None, arguments: Any = None) -> Marker[ToolRun]: ...
def tool(tool: F | str, *, tool_call_id: str | None = None, arguments: Any = None) -> F | Marker[ToolRun]:
    """The code inside is a tool: its tool result (ok, error, timeout or empty) is recorded.

    A decorator or a context manager, sync or async. `tool_call_id` is the id of the tool call that asked for it,
    where the model's API has one; without it, the tool belongs to the latest call of the `agent` around it. A decorated
    function reports its arguments and result by itself. Outside any rollout nothing is recorded.

    >>> @tool
    ... def add(a, b):
    ...     return a + b
    >>> with tool("add", tool_call_id="call_1", arguments={"a": 1, "b": 2}) as run:
    ...     run.result = add(1, 2)
    """
    if isinstance(tool, str):
        return Marker("tool", lambda: ToolRun(tool, tool_call_id, arguments))
    name = _name_of(tool)
    return Marker("tool", lambda: ToolRun(name, None, None))(tool)


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, as far as the function names them."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    return dict(bound.arguments)
