"""Carries attempt and identity into bare threads and thread pools, which do not inherit context variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from typing import Any, cast

from agl_core.capture.context import Carried


class ThreadCarrying:
    """Patches `threading.Thread.start` and `ThreadPoolExecutor.submit`.

    A thread belongs to the attempt that started it, a pool's thread to the one that submitted what it does.
    """

    def __init__(self) -> None:
        self._patched: tuple[Any, Any] | None = None
        self._originals: tuple[Any, Any] | None = None

    def install(self) -> None:
        """Patch both; doing it again changes nothing."""
        if self._originals is not None:
            return
        start: Any = Thread.start
        submit: Any = ThreadPoolExecutor.submit

        @functools.wraps(start)
        def carrying_start(thread: Thread) -> None:
            carried = Carried.here()
            if not carried.is_empty:
                # The instance's attribute hides the method, so that subclasses that override `run` are reached too.
                thread.run = functools.partial(_run_carried, carried, thread.run)  # type: ignore[method-assign]
            start(thread)

        @functools.wraps(submit)
        def carrying_submit(
            pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
        ) -> Future[Any]:
            carried = Carried.here()
            if carried.is_empty:
                return cast("Future[Any]", submit(pool, function, *args, **kwargs))
            # A pool's thread outlives this attempt: it must not be started as one of its threads.
            with Carried().applied():
                work = functools.partial(_run_carried, carried, functools.partial(function, *args, **kwargs))
                return cast("Future[Any]", submit(pool, work))

        self._originals, self._patched = (start, submit), (carrying_start, carrying_submit)
        _set(*self._patched)

    def uninstall(self) -> None:
        """Restore what was patched, except where somebody else has patched it since."""
        if self._originals is None or self._patched is None:
            return
        present = (Thread.start, ThreadPoolExecutor.submit)
        _set(
            *(
                original if now is patched else now
                for now, patched, original in zip(present, self._patched, self._originals, strict=True)
            )
        )
        self._originals = self._patched = None


def _set(start: Any, submit: Any) -> None:
    Thread.start = start  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


def _run_carried(carried: Carried, run: Callable[[], Any]) -> Any:
    with carried.applied():
        return run()
