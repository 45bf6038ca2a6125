"""Async agents share the worker's process until one of them blocks it; then each gets a process of its own."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from pathlib import Path
from types import FrameType

from agl_core.capture import Recording
from agl_core.wire.workers import Assignment
from agl_core.worker.environment import Ended, Runner
from agl_core.worker.runners.in_process import InProcess

logger = logging.getLogger(__name__)

_TICK = 0.1
_MOST_MISSED = 20
"""Ticks of the watching thread, without one of the event loop and all in one agent's code, after which that blocks it.

Counted, not measured: while the whole process stands still, or is short of the processor, neither of them ticks.
"""
_OURS = tuple(str(Path(file).parent) for file in (asyncio.__file__, Path(__file__).parent))


class MovesOut:
    """Runs attempts in this process until an agent blocks the event loop for two seconds, later ones by `processes`.

    The attempt that blocks, and those that are running beside it, end where they are.
    """

    def __init__(self, here: InProcess, processes: Runner) -> None:
        self._here, self._processes = here, processes
        self._moved = False
        self._ticks = 0
        self._closed = threading.Event()
        self._ticking: asyncio.Task[None] | None = None

    @property
    def abandoned(self) -> int:
        return self._here.abandoned + self._processes.abandoned

    async def start(self) -> None:
        await self._here.start()
        self._ticking = asyncio.create_task(self._tick())
        watching = threading.Thread(target=self._watch, args=(threading.get_ident(),), daemon=True, name="agl-watch")
        watching.start()

    async def close(self) -> None:
        self._closed.set()
        if self._ticking is not None:
            self._ticking.cancel()
        await self._here.close()
        await self._processes.close()

    async def run(self, assignment: Assignment, base_url: str, recording: Recording) -> Ended:
        if not self._moved:
            return await self._here.run(assignment, base_url, recording)
        await self._processes.start()
        return await self._processes.run(assignment, base_url, recording)

    async def _tick(self) -> None:
        while True:
            self._ticks += 1
            await asyncio.sleep(_TICK)

    def _watch(self, loop_thread: int) -> None:
        seen, missed, blocking = self._ticks, 0, None
        while not self._closed.wait(_TICK):
            frame = _agents_frame(sys._current_frames().get(loop_thread)) if self._ticks == seen else None
            missed = missed + 1 if frame is not None and frame is blocking else 0
            seen, blocking = self._ticks, frame
            if frame is not None and missed >= _MOST_MISSED:
                self._moved = True
                logger.warning(
                    "An agent blocks the worker's event loop, and with it all other agents (%s:%d in %s). From now on "
                    "each attempt gets a process of its own. [workers] isolation = 'process' does so from the start.",
                    Path(frame.f_code.co_filename).name,
                    frame.f_lineno,
                    frame.f_code.co_name,
                )
                return


def _agents_frame(frame: FrameType | None) -> FrameType | None:
    """The outermost frame of the agent's code that this thread runs; None if it runs nobody's."""
    found: FrameType | None = None
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        found, frame = frame, frame.f_back
    return None if frame is None else found
