"""Agents that are commands: each attempt runs one, in a process and a folder of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import orjson

from agl_core.capture import Recording
from agl_core.capture.attaching import bootstrap_variables
from agl_core.capture.recording import read_spool
from agl_core.errors import AgentError
from agl_core.types import AttemptKey, Ending
from agl_core.wire.workers import MAX_RESULT, Assignment
from agl_core.worker.agent import attempt_variables
from agl_core.worker.processes import EXIT_GRACE, ForkedProcesses, ForkerGoneError, ProcessSetup, attempt_folder, fate
from agl_core.worker.report import Ended, bounded_text, finished

_MAX_OUTPUT = MAX_RESULT - 1024
"""Bytes that are kept of the end of a command's output; there is room left for a note."""
_MAX_ERRORS = 2000
"""Bytes that are kept of the stderr of a command that failed."""

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group (struct ucred)."""


class CommandPerAttempt(ForkedProcesses):
    """Runs a command for each attempt, with the attempt in its environment, in an empty folder of the attempt's own.

    Arguments that name a file in `folder` are made absolute, and for -m and -c, Python finds modules there. The
    result is the last line that the command prints if that is JSON, else its output. Of an output that is too long for
    a result, the end is kept, with a note. What other processes print counts only if the command itself prints nothing.
    Any exit status but 0 is a crash. `memory` is in bytes. In its Python processes the installed adapters are attached,
    and those of the files `plugins` (None: none are).
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
        program, *arguments = command
        if not has_program(program, folder):
            raise AgentError(
                f"agent.command: there is no program '{program}' to run, neither on the PATH nor relative to "
                f"{folder}. Install it, or write its whole path."
            )
        folder = folder.absolute()
        program = str(folder / program) if os.path.dirname(program) else program
        self._command = [program, *(_from(folder, argument) for argument in arguments)]
        self._modules = str(folder) if {"-m", "-c"} & set(arguments) else None
        self._plugins = plugins
        super().__init__(ProcessSetup(str(folder), memory=memory), {})

    async def run(self, assignment: Assignment, base_url: str, recording: Recording) -> Ended:
        with attempt_folder() as folder:
            reports, work = folder / "reports", folder / "work"
            reports.mkdir()
            work.mkdir()
            variables = attempt_variables(assignment, base_url)
            if self._modules is not None:
                paths = (self._modules, os.environ.get("PYTHONPATH"))
                variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            if self._plugins is not None:
                key = AttemptKey(assignment.rollout, assignment.attempt)
                inherited = {**os.environ, **variables}
                variables |= bootstrap_variables(key, base_url, assignment.key, reports, inherited, self._plugins)
            job = {"command": self._command, "folder": str(work), "variables": variables}
            try:
                return await self._ended(job, recording)
            finally:
                await _read_reports(reports, recording)

    async def _ended(self, job: Mapping[str, Any], recording: Recording) -> Ended:
        status, failures = None, list[str]()
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(_Output())
            stderr, its_stderr = await _piped(stack)
            try:
                async with self.started(output.theirs.fileno(), its_stderr.fileno()) as process:
                    output.theirs.close()
                    its_stderr.close()
                    process.send(job)
                    failures = [message["failed"] async for message in process.messages() if "failed" in message]
                    status = await process.exited
                await asyncio.wait({output.ended, stderr.ended}, timeout=EXIT_GRACE)
            except ForkerGoneError as error:
                return Ended(Ending.LOST, error=str(error))
            except asyncio.CancelledError:
                if status is None:
                    raise
        if failures:
            return Ended(Ending.CRASHED, error=failures[0])
        if status != 0:
            tail = stderr.text()
            its_end = f"; the end of its stderr: {tail}" if tail else ""
            return Ended(Ending.CRASHED, error=f"the command {fate(status)}{its_end}")
        return finished(_printed(output.of_the_command(recording)))


def has_program(program: str, folder: Path) -> bool:
    """Whether a command that runs in `folder` finds its program; a name with a slash is a path from there."""
    return shutil.which(folder / program if os.path.dirname(program) else program) is not None


def _from(folder: Path, argument: str) -> str:
    """The argument of a command; absolute if it names a file in `folder`, or a folder there by a path with a slash."""
    path = os.path.join(folder, argument)
    is_folder = os.path.isdir(path) and (os.sep in argument or argument == os.curdir)
    return path if is_folder or os.path.isfile(path) else argument


async def _read_reports(folder: Path, recording: Recording) -> None:
    """Read what the command's processes reported, in a thread, to its end: also if this is cancelled meanwhile."""
    reading = asyncio.ensure_future(asyncio.to_thread(read_spool, folder, recording))
    try:
        await asyncio.shield(reading)
    except asyncio.CancelledError:
        await asyncio.wait({reading})


class _Tail(asyncio.Protocol):
    """The last `limit` bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self._limit, self._kept = limit, bytearray()
        self.size = 0
        """Bytes that came."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._kept += data
        self.size += len(data)
        del self._kept[: -self._limit]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def dropped(self) -> int:
        """Bytes that came before those that are kept."""
        return self.size - len(self._kept)

    def text(self) -> str:
        return self._kept.decode(errors="replace").strip()


async def _piped(stack: contextlib.ExitStack) -> tuple[_Tail, IO[bytes]]:
    """A pipe for stderr: the end of what comes through, and the file to write to. Scripts can open it by its path."""
    ours, theirs = os.pipe()
    transport, tail = await asyncio.get_running_loop().connect_read_pipe(
        lambda: _Tail(_MAX_ERRORS), os.fdopen(ours, "rb")
    )
    stack.callback(transport.close)
    return tail, stack.enter_context(os.fdopen(theirs, "wb"))


class _Output:
    """The end of what a command prints: all of it, and apart from that what its own process writes.

    It is a socket: unlike a pipe, nobody can open it by /proc/PID/fd/1, and on Linux the system says who wrote. The
    first to write is the command's process, before it becomes the command.
    """

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        if sys.platform == "linux":
            self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._all, self._own = _Tail(_MAX_OUTPUT), _Tail(_MAX_OUTPUT)
        self._command: int | None = None
        self.ended: asyncio.Future[None] = self._all.ended

    def __enter__(self) -> _Output:
        asyncio.get_running_loop().add_reader(self._ours, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._ours)
        self._ours.close()
        self.theirs.close()

    def of_the_command(self, recording: Recording) -> _Tail:
        """What its own process printed, if that is anything, else all."""
        if not self._own.text():
            return self._all
        if self._all.size > self._own.size:
            recording.problem(
                "Other processes wrote to the output of the agent's command. That is no part of its result, since the "
                "command printed something itself. A shell script has to start its agent with exec."
            )
        return self._own

    def _read(self) -> None:
        try:
            data, ancillary, _, _ = self._ours.recvmsg(2**16, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._ours)
            self._all.connection_lost(None)
            return
        pids = [_CREDENTIALS.unpack(sent)[0] for _, _, sent in ancillary if len(sent) == _CREDENTIALS.size]
        writer = pids[0] if pids else 0
        self._command = writer if self._command is None else self._command
        self._all.data_received(data)
        if writer == self._command:
            self._own.data_received(data)


def _printed(output: _Tail) -> object:
    """The result of a command that printed this."""
    text = output.text()
    try:
        return orjson.loads(text.rpartition("\n")[2])
    except orjson.JSONDecodeError:
        note = f"(of its output, {output.dropped} bytes more, which came before, were not kept)\n"
        text = bounded_text(text, MAX_RESULT - 2 * len(note), from_end=True)
        return f"{note}{text}" if output.dropped else text or None
