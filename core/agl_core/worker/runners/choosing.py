"""Which runner a configuration asks for; and a runner that changes from tasks to processes when an agent blocks."""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from agl_core.capture import Recording
from agl_core.config.models import AgentSection, WorkerSection
from agl_core.wire.workers import Assignment
from agl_core.worker.agent import load_agent
from agl_core.worker.environment import Ended, Runner
from agl_core.worker.runners.in_process import InProcess
from agl_core.worker.runners.isolated import CommandPerAttempt, ProcessPerAttempt

logger = logging.getLogger(__name__)

_TICK = 0.1
_MOST_MISSED = 20
"""An agent blocks the event loop if the loop misses so many ticks of the watching thread, all in that agent's code.

Ticks are counted and not seconds: while the whole process is stopped or starved, neither of the two ticks.
"""
_OURS = tuple(str(Path(file).parent) for file in (asyncio.__file__, Path(__file__).parent))


def choose_runner(
    agent: AgentSection, workers: WorkerSection, *, folder: Path, plugins: Sequence[Path], base_url: str
) -> Runner:
    """The runner of this agent's attempts, for the server at `base_url`.

    Its module, and files that its command names, are also looked for in `folder`; `plugins` are files whose adapters
    are to be attached. A Python agent is imported, so attach adapters in this process before. AgentError if the import
    fails, or if there is no such command.
    """
    attached = plugins if agent.attach else None
    memory = None if workers.memory_mib is None else workers.memory_mib * 2**20
    if agent.command is not None:
        command = shlex.split(agent.command) if isinstance(agent.command, str) else list(agent.command)
        return CommandPerAttempt(command, folder, plugins=attached, memory=memory)
    assert agent.entry is not None
    imported = load_agent(agent.entry, folder)
    if workers.isolation == "none":
        return InProcess(imported)
    stays = workers.isolation == "auto" and imported.is_async and memory is None
    processes = ProcessPerAttempt(agent.entry, folder, base_url=base_url, plugins=attached, memory=memory, stays=stays)
    return MovesOut(InProcess(imported), processes) if stays else processes


class MovesOut:
    """Runs attempts in this process; once an agent blocks the event loop for two seconds, later ones by `processes`.

    The attempt that blocks, and those that run beside it, stay in this process.
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

    @property
    def at_once(self) -> int:
        return self._processes.at_once if self._moved else self._here.at_once

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
    """The outermost frame of the agent's code that this thread runs; None if it runs no agent's."""
    found: FrameType | None = None
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        found, frame = frame, frame.f_back
    return None if frame is None else found
