"""The event loop on which the server runs."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

try:
    from uvloop import new_event_loop
except ImportError:  # Windows has none
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] | None = None  # type: ignore[no-redef]

Result = TypeVar("Result")

_NEW_OBJECTS = 10_000
"""So many more objects than at its last look make the garbage collector look again; 700 unless it is set.

Hundreds of calls in flight are thousands of objects. Most are gone when their call ends, without the collector; one
that looks before finds them alive, counts them as old, and then goes through everything the server remembers.
"""
_NEVER = 1 << 30
"""Of looks at younger objects, after which the garbage collector looks at all by itself."""
_LOOKS_AT_ALL = 60.0
"""Seconds after which it looks at all objects although the process is busy."""
_IDLE = 0.1
"""Of a second: a process that used less CPU time in it is idle."""


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` on uvloop's event loop where there is one: it takes less of every request's time.

    What is there at the start, all that was imported, is there to stay: the garbage collector looks at it no more, or
    it would stop every request in flight for a tenth of a second now and then. For the same reason it looks at all
    that the server remembers when the process is idle, or once a minute.

    >>> async def example() -> int:
    ...     return 1
    >>> run(example())
    1
    """
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, before[1], _NEVER)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_collecting(main))
    finally:
        gc.set_threshold(*before)


async def _collecting(main: Coroutine[Any, Any, Result]) -> Result:
    collecting = asyncio.create_task(_collect_when_idle())
    try:
        return await main
    finally:
        collecting.cancel()


async def _collect_when_idle() -> None:
    used, collected = time.process_time(), time.monotonic()
    while True:
        await asyncio.sleep(1)
        before, used = used, time.process_time()
        is_due = used - before < _IDLE or time.monotonic() - collected > _LOOKS_AT_ALL
        if is_due and gc.get_count()[2]:
            gc.collect()
            collected = time.monotonic()
