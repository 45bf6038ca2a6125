"""Watching methods of a class and of all its subclasses, the user's own included, while they run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from agl_core.capture import report_problem


class Watch:
    """One run of a watched method. None of its methods may raise."""

    def applied(self) -> AbstractContextManager[None]:
        """The context that the method runs in; a stream's, only while its next item is made."""
        return nullcontext()

    def item(self, item: Any) -> None:
        """The method returned this, or yields it."""

    def closed(self, error: Exception | None) -> None:
        """The method came to its end, or raised. It is not called when the run was cancelled or left early."""


Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
Start: TypeAlias = Callable[[Any, Arguments], Watch | None]
"""Called with `self` and the arguments when the method is called; None: this run is not watched."""


def argument(arguments: Arguments, position: int, name: str) -> Any:
    """An argument by its position or name; None if it was not given.

    >>> argument(((1, 2), {"c": 3}), 1, "b"), argument(((1, 2), {"c": 3}), 2, "c")
    (2, 3)
    """
    positional, named = arguments
    return positional[position] if position < len(positional) else named.get(name)


def watch(root: type[Any], names: tuple[str, ...], start: Start) -> None:
    """Watch methods of `root` and of all its subclasses, those defined later included.

    They are coroutine functions, or functions that return an async generator.
    """
    inherited = root.__dict__.get("__init_subclass__")

    def init_subclass(cls: Any, /, **options: Any) -> None:
        if inherited is None:
            super(root, cls).__init_subclass__(**options)
        else:
            inherited.__func__(cls, **options)
        _wrap(cls, names, start)

    # A class that inherits from root in two ways must not be watched twice.
    kinds: set[type[Any]] = {root, *_subclasses(root)}
    for kind in kinds:
        _wrap(kind, names, start)
    root.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]


def _subclasses(root: type[Any]) -> Iterator[type[Any]]:
    for kind in root.__subclasses__():
        yield kind
        yield from _subclasses(kind)


def _wrap(kind: type[Any], names: tuple[str, ...], start: Start) -> None:
    for name in names:
        method = kind.__dict__.get(name)
        if inspect.isfunction(method) and not getattr(method, "__isabstractmethod__", False):
            wrap = _coroutine if inspect.iscoroutinefunction(method) else _stream
            setattr(kind, name, functools.wraps(method)(wrap(method, start)))


def _started(method: Any, start: Start, instance: Any, arguments: Arguments) -> Watch | None:
    try:
        return start(instance, arguments)
    except Exception as error:
        report_problem(f"Watching {method.__qualname__}", error)
        return None


def _coroutine(method: Callable[..., Any], start: Start) -> Callable[..., Any]:
    async def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = _started(method, start, self, (args, kwargs))
        if watch is None:
            return await method(self, *args, **kwargs)
        try:
            with watch.applied():
                result = await method(self, *args, **kwargs)
        except Exception as error:
            watch.closed(error)
            raise
        watch.item(result)
        watch.closed(None)
        return result

    return watched


def _stream(method: Callable[..., Any], start: Start) -> Callable[..., Any]:
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = _started(method, start, self, (args, kwargs))
        if watch is None:
            return method(self, *args, **kwargs)
        with watch.applied():
            source = method(self, *args, **kwargs)
        return _items(source, watch)

    return watched


async def _items(source: AsyncIterator[Any], watch: Watch) -> AsyncGenerator[Any, None]:
    try:
        while True:
            # Not around the yield: between two items the consumer runs, not the method.
            with watch.applied():
                item = await anext(source)
            watch.item(item)
            yield item
    except StopAsyncIteration:
        watch.closed(None)
    except Exception as error:
        watch.closed(error)
        raise
    finally:
        if isinstance(source, AsyncGenerator):
            with watch.applied():
                await source.aclose()
