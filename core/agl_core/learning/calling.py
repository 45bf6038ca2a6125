"""How rules are called: off the event loop, and each within its time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import inspect
import threading
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, TypeVar

from agl_core.errors import AglError
from agl_core.sandbox import SANDBOX_SECONDS, IsolatedRule

Argument = TypeVar("Argument")

_SECONDS = 60.0
"""The time limit of a function, which computes."""
_SECONDS_TO_WAIT = 600.0
"""The time limit of an async function, which waits: for a server, and for its turn there."""
_GRACE = 1.0
"""Seconds for an event loop to show that it still runs."""


class RuleTimeoutError(AglError, TimeoutError):
    """A reward rule took too long."""


async def call_rule(
    rule: Callable[[Argument], Any], argument: Argument, time_limit: float | None, turn: asyncio.Lock
) -> Any:
    """What a rule says. RuleTimeoutError if it takes longer than `time_limit`, or than the default of its kind.

    A function is called in a thread, one at a `turn`; an async one runs on the event loop of all rules. So a rule that
    never returns costs its own time, not the server's. A thread cannot be ended while it is inside a single call of C
    code, nor do others run if that holds Python's lock, as `re` does: such a rule belongs in a sandbox.
    """
    if isinstance(rule, IsolatedRule):
        return await rule(argument, time_limit or SANDBOX_SECONDS)  # type: ignore[arg-type]
    async with turn:
        value = await _in_thread(lambda: rule(argument), time_limit or _SECONDS)
    return await _on_rules_loop(value, time_limit or _SECONDS_TO_WAIT) if inspect.isawaitable(value) else value


async def _in_thread(function: Callable[[], Any], seconds: float) -> Any:
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

    def give(*found: Any) -> None:
        if not outcome.done():
            outcome.set_result(found)

    def run() -> None:
        error: Exception | None
        try:
            value, error = function(), None
        except Exception as raised:
            value, error = None, raised
        except SystemExit:  # Its own, or that of `_interrupt`.
            value, error = None, RuntimeError("it raised SystemExit")
        with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
            loop.call_soon_threadsafe(give, value, error)

    # No executor's: Python waits for their threads at its end, which a rule that never returns would prevent.
    thread = threading.Thread(target=run, name="agl-rule", daemon=True)
    thread.start()
    done, _ = await asyncio.wait({outcome}, timeout=seconds)
    if not done:
        outcome.cancel()
        _interrupt(thread)
        raise _too_long(seconds)
    value, error = outcome.result()
    if error is not None:
        raise error
    return value


async def _on_rules_loop(value: Awaitable[Any], seconds: float) -> Any:
    async def awaited() -> Any:
        try:
            return await value
        except SystemExit:
            raise RuntimeError("it raised SystemExit") from None

    loop, thread = _rules_loop()
    running = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(awaited(), loop))
    try:
        if (await asyncio.wait({running}, timeout=seconds))[0]:
            return running.result()
    finally:
        running.cancel()
    alive: concurrent.futures.Future[None] = concurrent.futures.Future()
    loop.call_soon_threadsafe(alive.set_result, None)
    if not (await asyncio.wait({asyncio.wrap_future(alive)}, timeout=_GRACE))[0]:
        _rules_loop.cache_clear()  # The rule computes instead of waiting: the others get another loop.
        _interrupt(thread)
    raise _too_long(seconds)


@cache
def _rules_loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="agl-rules", daemon=True)
    thread.start()
    return loop, thread


def _interrupt(thread: threading.Thread) -> None:
    """Raise SystemExit in it, as soon as it executes Python code again."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def _too_long(seconds: float) -> RuleTimeoutError:
    return RuleTimeoutError(f"it took longer than {seconds:g} seconds; its table's `time_limit` allows more")
