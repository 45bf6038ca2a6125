"""Carries attempt and identity into bare threads and thread pools, which do not inherit context variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from typing import Any, cast

from agl_core.capture.attach.methods import Patches
from agl_core.capture.context import Carried


def carry_into_threads(patches: Patches) -> None:
    """A thread belongs to the attempt that started it, a pool's thread to the one that submitted its work."""
    patches.replace(Thread, "start", _carrying_start)
    patches.replace(ThreadPoolExecutor, "submit", _carrying_submit)


def _carrying_start(start: Callable[[Thread], None]) -> Callable[[Thread], None]:
    def carrying_start(thread: Thread) -> None:
        carried = Carried.here()
        if not carried.is_empty:
            # The instance's attribute hides the method, so that subclasses that override `run` are reached too.
            thread.run = functools.partial(_run_carried, carried, thread.run)  # type: ignore[method-assign]
        start(thread)

    return carrying_start


def _carrying_submit(submit: Callable[..., Any]) -> Callable[..., Future[Any]]:
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

    return carrying_submit


def _run_carried(carried: Carried, run: Callable[[], Any]) -> Any:
    with carried.applied():
        return run()
