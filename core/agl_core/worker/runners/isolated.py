"""Agents in processes of their own: Python agents, and any command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import orjson
from pydantic import TypeAdapter, ValidationError

from agl_core.capture import Recording
from agl_core.capture.attach.environment import bootstrapped
from agl_core.capture.recording import Report
from agl_core.errors import AgentError
from agl_core.types import AttemptKey, Ending
from agl_core.wire.workers import MAX_RESULT, Assignment
from agl_core.worker.bounds import bounded_text
from agl_core.worker.environment import Ended, attempt_variables, client_variables, finished
from agl_core.worker.runners.processes import ForkerGoneError, Process, Processes, Setup

_EXIT_GRACE = 2.0
"""Seconds for a process to exit after its result came, and for its output to end after it exited."""
_MOST_OUTPUT = MAX_RESULT - 1024
"""Bytes that are kept of the end of a command's output; there is room left for a note."""
_MOST_ERRORS = 2000
"""Bytes that are kept of the stderr of a command that failed."""

_ENDED = TypeAdapter(Ended)


class _Isolated:
    """Attempts in processes of their own, of which nothing is ever abandoned."""

    abandoned = 0
    at_once = 32

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    async def start(self) -> None:
        await self._processes.start()

    async def close(self) -> None:
        await self._processes.close()


class ProcessPerAttempt(_Isolated):
    """Runs each attempt of a Python agent in a process of its own, which is a fork of the forker.

    If the forker has imported the agent, a start takes milliseconds. When time is up, the process and everything
    that it started are ended, so nothing is ever abandoned. `plugins` are files whose adapters are attached there,
    beside the installed ones (None: none are); `memory` is in bytes.
    """

    def __init__(
        self,
        entry: str,
        folder: Path,
        *,
        base_url: str,
        plugins: Sequence[Path] | None = (),
        memory: int | None = None,
    ) -> None:
        setup = Setup(
            entry=entry,
            folder=str(folder),
            plugins=None if plugins is None else [str(each) for each in plugins],
            memory=memory,
        )
        super().__init__(Processes(setup, client_variables(base_url)))

    async def run(self, assignment: Assignment, base_url: str, recording: Recording) -> Ended:
        ended: Ended | None = None
        try:
            async with self._processes.started() as process:
                process.send({"assignment": assignment.model_dump(mode="json"), "base_url": base_url})
                ended = await self._ended(process, recording)
                await asyncio.wait({process.exited}, timeout=_EXIT_GRACE)
        except ForkerGoneError as error:
            return Ended(Ending.LOST, error=str(error))
        except asyncio.CancelledError:
            if ended is None:
                raise
        return ended

    async def _ended(self, process: Process, recording: Recording) -> Ended:
        """How the agent ended, as soon as that is known; its process may still be exiting."""
        reading = asyncio.create_task(_read(process, recording))
        try:
            either: set[asyncio.Future[Any]] = {reading, process.exited}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({reading}, timeout=_EXIT_GRACE)
            ended = reading.result() if reading.done() else None
        except ValueError as error:
            return Ended(Ending.CRASHED, error=f"what the agent's process sent cannot be read ({error})")
        finally:
            reading.cancel()
        if ended is not None:
            return ended
        return Ended(Ending.CRASHED, error=f"the agent's process {_fate(await process.exited)} before it had a result")


class CommandPerAttempt(_Isolated):
    """Runs a command for each attempt, with the attempt in its environment.

    The result is the last line that it prints if that is JSON, else its output. Of an output that is too long for a
    result, the end is kept, with a note. Any exit status but 0 is a crash. It runs in `folder`, and `memory` is in
    bytes. In its Python processes the installed adapters are attached, and those of the files `plugins` (None: none
    are).
    AgentError if there is no such program.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        plugins: Sequence[Path] | None = (),
        memory: int | None = None,
    ) -> None:
        program = command[0]
        if not is_there(program, folder):
            raise AgentError(
                f"agent.command: there is no program '{program}' to run, neither on the PATH nor relative to "
                f"{folder}. Install it, or write its whole path."
            )
        self._command, self._folder, self._plugins = list(command), folder, plugins
        super().__init__(Processes(Setup(memory=memory), {}))

    async def run(self, assignment: Assignment, base_url: str, recording: Recording) -> Ended:
        with contextlib.ExitStack() as stack:
            variables = attempt_variables(assignment, base_url)
            if self._plugins is not None:
                key = AttemptKey(assignment.rollout, assignment.attempt)
                attaching = bootstrapped(key, base_url, assignment.key, recording, os.environ, self._plugins)
                variables |= stack.enter_context(attaching)
            stdout, its_stdout = await _piped(stack, _MOST_OUTPUT)
            stderr, its_stderr = await _piped(stack, _MOST_ERRORS)
            try:
                async with self._processes.started(its_stdout.fileno(), its_stderr.fileno()) as process:
                    its_stdout.close()
                    its_stderr.close()
                    process.send({"command": self._command, "folder": str(self._folder), "variables": variables})
                    failed = [message["failed"] async for message in process.messages() if "failed" in message]
                    status = await process.exited
            except ForkerGoneError as error:
                return Ended(Ending.LOST, error=str(error))
            await asyncio.wait({stdout.ended, stderr.ended}, timeout=_EXIT_GRACE)
        if failed:
            return Ended(Ending.CRASHED, error=failed[0])
        if status != 0:
            tail = stderr.text().strip()
            return Ended(
                Ending.CRASHED, error=f"the command {_fate(status)}{f'; the end of its stderr: {tail}' if tail else ''}"
            )
        return finished(_printed(stdout))


def is_there(program: str, folder: Path) -> bool:
    """Whether a command that runs in `folder` finds its program; a name with a slash is a path from there."""
    return shutil.which(folder / program if os.path.dirname(program) else program) is not None


async def _read(process: Process, recording: Recording) -> Ended | None:
    """Record the process's reports, until it ends or reports how the attempt ended."""
    async for message in process.messages():
        try:
            if "failed" in message:
                return Ended(Ending.LOST, error=str(message["failed"]))
            if "ended" in message:
                return _ENDED.validate_python(message["ended"])
            Report.model_validate(message).add_to(recording)
        except ValidationError as error:
            raise ValueError(f"{error.error_count()} fields are wrong") from error
    return None


class _Tail(asyncio.Protocol):
    """The end of what comes through a pipe."""

    def __init__(self, most: int) -> None:
        self._most, self._kept = most, bytearray()
        self.dropped = 0
        """Bytes that came before those that are kept."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._kept += data
        self.dropped += max(len(self._kept) - self._most, 0)
        del self._kept[: -self._most]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def text(self) -> str:
        return self._kept.decode(errors="replace")


async def _piped(stack: contextlib.ExitStack, most: int) -> tuple[_Tail, IO[bytes]]:
    """A pipe: the reader, which keeps the end of what comes through, and the file to write to."""
    ours, theirs = os.pipe()
    transport, tail = await asyncio.get_running_loop().connect_read_pipe(lambda: _Tail(most), os.fdopen(ours, "rb"))
    stack.callback(transport.close)
    return tail, stack.enter_context(os.fdopen(theirs, "wb"))


def _printed(output: _Tail) -> object:
    """The result of a command that printed this."""
    text = output.text().strip()
    try:
        return orjson.loads(text.rpartition("\n")[2])
    except orjson.JSONDecodeError:
        note = f"(of its output, {output.dropped} bytes more, which came before, were not kept)\n"
        text = bounded_text(text, MAX_RESULT - 2 * len(note), from_end=True)
        return f"{note}{text}" if output.dropped else text or None


def _fate(status: int) -> str:
    """What became of a process, by its status from waitpid."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
