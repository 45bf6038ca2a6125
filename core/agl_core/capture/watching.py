"""Wrappers for functions of frameworks and HTTP libraries without a hook."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

from agl_core.capture.context import HERE, current_attempt, holding
from agl_core.capture.reports import report_problem

Enter: TypeAlias = Callable[..., AbstractContextManager[Any] | None]
"""Called with the arguments of a call, which is then made inside what it returns."""
_Wrap: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

_WRAPPED = "_agl_wrapped"
"""Marks a function that was replaced; `functools.wraps` copies the mark to wrappers around it."""


def watch(owner: Any, name: str, enter: Enter, *, streams: bool = False) -> None:
    """Until `Attachment.detach`, make each call of a function in a rollout inside `enter` (`in_rollout`, `within`)."""
    watches().replace(owner, name, lambda function: watched(function, enter, streams=streams))


def watched(function: Callable[..., Any], enter: Enter, *, streams: bool = False) -> Callable[..., Any]:
    """The function, each call of it in a rollout made inside `enter`."""
    wrap = within(functools.partial(in_rollout, enter), streams=streams)
    return functools.update_wrapper(wrap(function), function)


def wrap_once(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace the function `name` of a module, class or object for good; a second time changes nothing.

    >>> import types
    >>> tools = types.SimpleNamespace(add=lambda a, b: a + b)
    >>> for _ in range(2):
    ...     wrap_once(tools, "add", lambda add: lambda *numbers: 10 * add(*numbers))
    >>> tools.add(1, 2)
    30
    """
    Patches().replace(owner, name, wrap)


class Patches:
    """Functions of modules, classes and objects that are replaced until `restore`."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, Any]] = []
        """Each owner and name, the owner's own function (None: it inherits), and what replaced it."""

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace the function `name` of `owner` by `wrap` of it; a second time changes nothing."""
        function = getattr(owner, name)
        if not hasattr(function, _WRAPPED):
            patched = functools.wraps(function)(wrap(function))
            setattr(patched, _WRAPPED, True)
            self._made.append((owner, name, vars(owner).get(name), patched))
            setattr(owner, name, patched)

    def restore(self) -> None:
        """Put the originals back, except where somebody else has replaced the function since."""
        for owner, name, own, patched in self._made:
            if getattr(owner, name) is patched:
                delattr(owner, name) if own is None else setattr(owner, name, own)
        self._made.clear()


@functools.cache
def watches() -> Patches:
    """The functions that `watch` has replaced in this process."""
    return Patches()


@contextmanager
def in_rollout(enter: Enter, /, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """In a rollout, enter what `enter` returns, unless that is None; what it raises is reported as a problem."""
    with ExitStack() as stack:
        run = None
        if current_attempt() is not None:
            try:
                manager = enter(*args, **kwargs)
                run = None if manager is None else stack.enter_context(manager)
            except Exception as error:
                report_problem(f"{enter.__module__}.{enter.__qualname__}", error)
        yield run


def within(enter: Callable[..., AbstractContextManager[Any]], *, streams: bool = False) -> _Wrap:
    """A wrapper of functions, sync or async: each call is made inside `enter(*args, **kwargs)`.

    If the object that it yields has a `result`, that is set to what the function returned. With `streams`, a call that
    returns a generator, sync or async, lasts until its end, and its items are the results.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            with enter(*args, **kwargs) as run:
                return _noted(run, function(*args, **kwargs))

        async def inside_async(*args: Any, **kwargs: Any) -> Any:
            with enter(*args, **kwargs) as run:
                return _noted(run, await function(*args, **kwargs))

        def streaming(*args: Any, **kwargs: Any) -> Any:
            with holding(HERE, HERE.get()), ExitStack() as stack:
                run = stack.enter_context(enter(*args, **kwargs))
                result = function(*args, **kwargs)
                if isinstance(result, Generator):
                    return _Stream(run, stack.pop_all()).items(result)
                if isinstance(result, AsyncIterator):
                    return _Stream(run, stack.pop_all()).items_async(result)
                return _noted(run, result)

        is_async = inspect.iscoroutinefunction(routine_of(function))
        return inside_async if is_async else streaming if streams else inside

    return wrap


class _Stream:
    """A call that goes on between the items of its generator, where the reader has another context."""

    def __init__(self, run: Any, opened: ExitStack) -> None:
        self._run, self._opened, self._inside = run, opened, HERE.get()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        with holding(HERE, self._inside):
            try:
                yield
            finally:
                self._inside = HERE.get()

    def _end(self, error: BaseException | None) -> None:
        with self._going_on():
            self._opened.__exit__(type(error) if error else None, error, None)

    def items(self, source: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        try:
            while True:
                with self._going_on():
                    item = next(source)
                yield _noted(self._run, item)
        except StopIteration as end:
            self._end(None)
            return end.value
        except BaseException as error:
            with self._going_on():
                source.close()
            self._end(error)
            raise

    async def items_async(self, source: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        try:
            while True:
                with self._going_on():
                    item = await anext(source)
                yield _noted(self._run, item)
        except StopAsyncIteration:
            self._end(None)
        except BaseException as error:
            if isinstance(source, AsyncGenerator):
                with self._going_on():
                    await source.aclose()
            self._end(error)
            raise


def _noted(run: Any, result: Any) -> Any:
    if hasattr(run, "result"):
        run.result = result
    return result


def routine_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, or the method by which an object is called."""
    return function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
