"""In every Python process of a run under faults: SIGUSR1 tells what it is doing, and its wall clock can be moved."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

_FOLDER = Path(os.environ["AGL_FAULTS_FOLDER"])
_CLOCK = _FOLDER / "clock"
"""Seconds by which the wall clock is wrong; the monotonic one never is."""


def _tell(number: int, frame: FrameType | None) -> None:
    """Write the stacks of all threads, and of the tasks of the main thread's event loop."""
    del number, frame
    with (_FOLDER / f"doing-{os.getpid()}.txt").open("w") as file:
        print(*sys.orig_argv, file=file, flush=True)
        faulthandler.dump_traceback(file)
        try:
            tasks = asyncio.all_tasks()
        except RuntimeError:  # It has no event loop.
            return
        for task in tasks:
            task.print_stack(file=file)


signal.signal(signal.SIGUSR1, _tell)

if _CLOCK.exists():
    _true_time = time.time

    def _wrong_time() -> float:
        return _true_time() + float(_CLOCK.read_text() or 0)

    time.time = _wrong_time
    time.time_ns = lambda: int(_wrong_time() * 1e9)
