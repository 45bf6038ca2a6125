"""Async agents as tasks of the worker's event loop, and a watch that names one that blocks it."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from agl_core.capture import Recording, running
from agl_core.types import Ending, Json
from agl_core.wire.workers import Assignment
from agl_core.worker.agent import Agent, AgentContext, active_attempt, agent_context
from agl_core.worker.report import Ended, crashed, finished

logger = logging.getLogger(__name__)

_CANCEL_GRACE = 2.0
"""Seconds an agent gets to end after it was cancelled."""
_TICK = 0.1
_MAX_MISSED_TICKS = 20
"""An agent blocks the event loop if the loop misses so many ticks of the watching thread, all in that agent's code.

Ticks are counted and not seconds: while the whole process is stopped or starved, neither of the two ticks.
"""
_OUR_FOLDERS = tuple(str(Path(file).parent) for file in (asyncio.__file__, __file__))


class TaskPerAttempt:
    """Runs attempts of an async agent in this process. Cheap, and nothing can be ended by force.

    A task that swallows its cancellation is abandoned when its time is up: it is counted in `abandoned`, and its later
    requests are refused. An agent that blocks keeps all others waiting: the first that does is named in a warning.
    """

    default_concurrency = 128

    def __init__(self, agent: Agent) -> None:
        self.abandoned = 0
        self._agent = agent
        self._ticks = 0
        self._ticking: asyncio.Task[None] | None = None
        self._closed = threading.Event()

    async def start(self) -> None:
        self._ticking = asyncio.create_task(self._tick())
        threading.Thread(target=self._watch, args=(threading.get_ident(),), daemon=True, name="agl-watch").start()

    async def close(self) -> None:
        self._closed.set()
        if self._ticking is not None:
            self._ticking.cancel()

    async def run(self, assignment: Assignment, base_url: str, recording: Recording) -> Ended:
        with running(active_attempt(assignment, base_url, recording)):
            call = _call(self._agent, assignment.task_input, agent_context(assignment, base_url))
            task = asyncio.create_task(call)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            if not task.done():
                await self._cancel(task)
                raise
        try:
            return finished(task.result())
        except asyncio.CancelledError:
            return Ended(Ending.CRASHED, error="the agent cancelled itself")
        except BaseException as error:
            return crashed(error)

    async def _cancel(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_GRACE)
        if not task.done():
            self.abandoned += 1
            logger.warning(
                "An agent did not end when cancelled and was abandoned (%d so far). [workers] isolation = 'process' "
                "ends such agents by force.",
                self.abandoned,
            )

    async def _tick(self) -> None:
        while True:
            self._ticks += 1
            await asyncio.sleep(_TICK)

    def _watch(self, loop_thread: int) -> None:
        """Log the first agent that blocks the event loop of this thread."""
        ticks, missed, blocking = self._ticks, 0, None
        while not self._closed.wait(_TICK):
            frame = _agent_frame(sys._current_frames().get(loop_thread)) if self._ticks == ticks else None
            missed = missed + 1 if frame is not None and frame is blocking else 0
            ticks, blocking = self._ticks, frame
            if frame is not None and missed >= _MAX_MISSED_TICKS:
                logger.warning(
                    "The agent blocks the worker's event loop, and with it all other attempts (%s:%d in %s). Give each "
                    "attempt a process of its own: set [workers] isolation = 'process'.",
                    Path(frame.f_code.co_filename).name,
                    frame.f_lineno,
                    frame.f_code.co_name,
                )
                return


async def _call(agent: Agent, task_input: Json, context: AgentContext) -> Any:
    return await agent.call(task_input, context)


def _agent_frame(frame: FrameType | None) -> FrameType | None:
    """The outermost frame of the agent's code that this thread runs; None if it runs none."""
    outermost: FrameType | None = None
    while frame is not None and not frame.f_code.co_filename.startswith(_OUR_FOLDERS):
        outermost, frame = frame, frame.f_back
    return None if frame is None else outermost
