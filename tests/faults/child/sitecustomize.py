"""In every Python process of a run under faults: SIGUSR1 tells what it is doing, and its wall clock can be moved."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

_CLOCK = Path(os.environ["AGL_FAULTS_FOLDER"], "clock")
"""Seconds by which the wall clock is wrong; the monotonic one never is."""


def _tell(number: int, frame: FrameType | None) -> None:
    """Write the stacks of all threads, and of the tasks of the main thread's event loop, to standard error."""
    del number, frame
    print(*sys.orig_argv, file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback(sys.__stderr__)
    with contextlib.suppress(RuntimeError):  # It has no event loop.
        for task in asyncio.all_tasks():
            task.print_stack(file=sys.__stderr__)


signal.signal(signal.SIGUSR1, _tell)

if _CLOCK.exists():
    _true_time = time.time

    def _wrong_time() -> float:
        return _true_time() + float(_CLOCK.read_text() or 0)

    time.time = _wrong_time
    time.time_ns = lambda: int(_wrong_time() * 1e9)
