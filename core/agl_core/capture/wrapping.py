"""Wrapping functions of frameworks, HTTP libraries and agents, where they have no hook; what they do stays as it is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def wrap_once(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace the function `name` of a module, class or object by `wrap` of it; a second time changes nothing.

    >>> import types
    >>> tools = types.SimpleNamespace(add=lambda a, b: a + b)
    >>> for _ in range(2):
    ...     wrap_once(tools, "add", lambda add: lambda *numbers: 10 * add(*numbers))
    >>> tools.add(1, 2)
    30
    """
    function = getattr(owner, name)
    if not hasattr(function, _WRAPPED):
        wrapped = functools.wraps(function)(wrap(function))
        setattr(wrapped, _WRAPPED, True)
        setattr(owner, name, wrapped)


_WRAPPED = "_agl_wrapped"
"""Marks a function that `wrap_once` made; `functools.wraps` copies the mark to wrappers around it."""


class Patches:
    """Functions of modules and classes that are replaced until `restore`."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, str], tuple[Any, Any]] = {}
        """The original and what replaced it, by owner and name."""

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace the function `name` of `owner` by `wrap` of it; a second time changes nothing."""
        if (owner, name) not in self._made:
            original = getattr(owner, name)
            patched = functools.wraps(original)(wrap(original))
            setattr(owner, name, patched)
            self._made[owner, name] = original, patched

    def restore(self) -> None:
        """Put the originals back, except where somebody else has replaced the function since."""
        for (owner, name), (original, patched) in self._made.items():
            if getattr(owner, name) is patched:
                setattr(owner, name, original)
        self._made.clear()


def within(enter: Callable[..., AbstractContextManager[Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper of functions, sync or async: each call is made inside `enter(*args, **kwargs)`.

    What that yields, unless it is None, gets what the function returned as its `result`.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            with enter(*args, **kwargs) as run:
                return _noted(run, function(*args, **kwargs))

        async def inside_async(*args: Any, **kwargs: Any) -> Any:
            with enter(*args, **kwargs) as run:
                return _noted(run, await function(*args, **kwargs))

        return inside_async if inspect.iscoroutinefunction(routine_of(function)) else inside

    return wrap


def _noted(run: Any, result: Any) -> Any:
    if run is not None:
        run.result = result
    return result


def routine_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, or the method by which an object is called."""
    return function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
