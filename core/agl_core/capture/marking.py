"""Agents written from scratch: decorators that mark which code is an agent or a tool."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar, overload

from agl_core.capture import context
from agl_core.capture.reports import guarded, record_tool_result
from agl_core.capture.status import Outcome, unknown_status
from agl_core.capture.watching import routine_of, within
from agl_core.errors import AgentError
from agl_core.types import Identity

F = TypeVar("F", bound=Callable[..., Any])

_NOT_SET: Any = object()


class Run:
    """One run of an agent or a tool: a context manager, or from the event `start` to the event `end`."""

    def __init__(self, adapter: str | None = None, of: Any = None) -> None:
        self.adapter, self.of = adapter, of
        """The adapter that sees it, and the adapter's own object for it."""
        self.result: Any = None
        self._scope: context.IdentityScope | None = None
        self._outer: context.Step | None = None

    def start(self) -> None:
        """It begins in this context."""

    def end(self, error: BaseException | None) -> None:
        """It has ended, or raised this."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end(error)


def open_runs(adapter: str | None) -> Iterator[Run]:
    """This adapter's open runs in this context, innermost first; None: those of markers."""
    runs = (scope.run for scope in context.open_scopes())
    return (run for run in runs if run is not None and run.adapter == adapter)


class AgentRun(Run):
    """One run of an agent. If it `only_calls`, the code around it runs the tools that its calls ask for."""

    def __init__(self, name: str, adapter: str | None = None, *, only_calls: bool = False, of: Any = None) -> None:
        super().__init__(adapter, of)
        self._name, self._only_calls = name, only_calls

    @guarded
    def start(self) -> None:
        around = context.current_scope()
        steps = around.steps if around is not None and self._only_calls else None
        self._outer = context.HERE.get().step
        who = Identity(self._name, span=context.new_span())
        self._scope = context.enter_identity(who, steps or context.Steps(), run=self)

    @guarded
    def end(self, error: BaseException | None) -> None:
        if self._scope is not None:
            self._scope.close()
            if not self._only_calls:
                context.move(step=self._outer)


class ToolRun(Run):
    """One run of a tool. In `with agl_core.tool(…) as run`, set `run.result`.

    `arguments` may be a function, which is called in a rollout only. A run of an `adapter` that was cut off from
    outside, because the framework has given it up, is not recorded.
    """

    def __init__(
        self,
        tool: str,
        tool_call_id: str | None,
        arguments: Any,
        adapter: str | None = None,
        *,
        only_failures: bool = False,
        is_code: bool = False,
        of: Any = None,
    ) -> None:
        super().__init__(adapter, of)
        self.result = _NOT_SET
        self.decided: Outcome | None = None
        """Its status, if the framework says more than the result."""
        self.only_failures = only_failures
        """A success is not recorded: it answers in the agent's name, or was cut off."""
        self._is_code = is_code
        """The tools that it runs answer the call that wrote it."""
        self._tool, self._tool_call_id, self._arguments = tool, tool_call_id, arguments
        self._agent: str | None = None
        self._parent_span: str | None = None
        self._started = 0.0

    @guarded
    def start(self) -> None:
        if context.current_attempt() is None:
            return
        around = context.current_scope()
        if around is not None:
            step = around.steps.step() if around.steps is not None else None
            self._agent = around.identity.agent if step is None else step.agent
            self._parent_span = around.identity.parent_span if around.steps is None else step.span if step else None
            if step is None and isinstance(around.run, ToolRun):
                self._parent_span = around.identity.span
        if callable(self._arguments):
            self._arguments = self._arguments()
        self._outer, self._started = context.HERE.get().step, time.time()
        # Calls that the tool makes are no steps of the agent that runs the tool.
        steps = around.steps if around is not None and self._is_code else None
        who = Identity(self._agent, span=context.new_span())
        self._scope = context.enter_identity(who, steps or context.Steps(), run=self)

    @guarded
    def end(self, error: BaseException | None) -> None:
        if self._scope is None:
            return
        self._scope.close()
        context.move(step=self._outer)
        is_given_up = self.adapter is not None and error is not None and not isinstance(error, Exception)
        if is_given_up or (error is None and self.only_failures):
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
            adapter=self.adapter,
        )


R = TypeVar("R", bound=Run)


class Marker(Generic[R]):
    """A decorator and a context manager, sync and async; each use of it is one run."""

    def __init__(self, word: str, new_run: Callable[[Callable[[], Any]], R]) -> None:
        self._word, self._new_run = word, new_run

    def __enter__(self) -> R:
        run = self._new_run(dict)
        run.of = self
        run.start()
        return run

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Concurrent contexts may share a marker: each ends the run that it began.
        run = next((run for run in open_runs(None) if run.of is self), None)
        if run is not None:
            run.end(error)

    async def __aenter__(self) -> R:
        return self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """The function, each call of it one run. AgentError for a generator: it has no clear end."""
        routine = routine_of(function)
        if inspect.isgeneratorfunction(routine) or inspect.isasyncgenfunction(routine):
            raise AgentError(
                f"agl_core.{self._word} cannot mark {_name_of(function)}, which is a generator: "
                f"use `with agl_core.{self._word}(…):` inside it."
            )
        marked = within(lambda *args, **kwargs: self._new_run(lambda: _bound(function, args, kwargs)))
        return functools.update_wrapper(marked(function), function)  # type: ignore[return-value]


def agent(name: str) -> Marker[AgentRun]:
    """Calls and tools inside are this agent's: a decorator or a context manager, sync or async.

    Each model call begins a step, to which a tool (see `tool`) without a call id belongs. Agents nest; concurrent runs,
    in tasks or threads, are kept apart.

    >>> @agent("writer")
    ... def write(topic):
    ...     return context.current_scope().identity.agent
    >>> write("spring")
    'writer'
    """
    return Marker("agent", lambda _: AgentRun(name))


@overload
def tool(tool: F) -> F: ...
@overload
def tool(tool: str, *, tool_call_id: str | None = None, arguments: Any = None) -> Marker[ToolRun]: ...
def tool(tool: F | str, *, tool_call_id: str | None = None, arguments: Any = None) -> F | Marker[ToolRun]:
    """The code inside is a tool, whose result (ok, error, timeout or empty) is recorded in a rollout.

    A decorator or a context manager, sync or async. `tool_call_id` is the id of the tool call that asked for it; a tool
    without one belongs to the latest call of the `agent` around it. A decorated function reports its arguments and
    result by itself.

    >>> @tool
    ... def add(a, b):
    ...     return a + b
    >>> with tool("add", tool_call_id="call_1", arguments={"a": 1, "b": 2}) as run:
    ...     run.result = add(1, 2)
    """
    if isinstance(tool, str):
        return Marker("tool", lambda _: ToolRun(tool, tool_call_id, arguments))
    name = _name_of(tool)
    return Marker("tool", lambda arguments: ToolRun(name, None, arguments))(tool)


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, as far as the function names them."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    return dict(bound.arguments)
