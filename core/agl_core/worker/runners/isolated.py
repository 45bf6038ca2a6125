"""Agents in processes of their own: Python agents, and any command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, ParamSpec

import orjson
from pydantic import TypeAdapter, ValidationError

from agl_core.capture import Recording
from agl_core.capture.attach.environment import bootstrap_variables
from agl_core.capture.recording import Report, read_spool
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

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group (struct ucred)."""
_ENDED = TypeAdapter(Ended)
P = ParamSpec("P")


class _Isolated:
    """Attempts in processes and folders of their own, of which nothing is ever abandoned."""

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
    beside the installed ones (None: none are); `memory` is in bytes. Its working folder is empty and the attempt's own,
    unless it `stays` in the worker's.
    """

    def __init__(
        self,
        entry: str,
        folder: Path,
        *,
        base_url: str,
        plugins: Sequence[Path] | None = (),
        memory: int | None = None,
        stays: bool = False,
    ) -> None:
        self._stays = stays
        setup = Setup(
            entry=entry,
            folder=str(folder),
            plugins=None if plugins is None else [str(each) for each in plugins],
            memory=memory,
        )
        super().__init__(Processes(setup, client_variables(base_url)))

    async def run(self, assignment: Assignment, base_url: str, recording: Recording) -> Ended:
        ended: Ended | None = None
        with contextlib.nullcontext() if self._stays else attempt_folder() as folder:
            try:
                async with self._processes.started() as process:
                    job = {"assignment": assignment.model_dump(mode="json"), "base_url": base_url}
                    process.send({**job, "folder": None if folder is None else str(folder)})
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
        if not is_there(program, folder):
            raise AgentError(
                f"agent.command: there is no program '{program}' to run, neither on the PATH nor relative to "
                f"{folder}. Install it, or write its whole path."
            )
        folder = folder.absolute()
        program = str(folder / program) if os.path.dirname(program) else program
        self._command = [program, *(_from(folder, each) for each in arguments)]
        self._modules = str(folder) if {"-m", "-c"} & set(arguments) else None
        self._plugins = plugins
        super().__init__(Processes(Setup(memory=memory), {}))

    async def run(self, assignment: Assignment, base_url: str, recording: Recording) -> Ended:
        with attempt_folder() as folder:
            reports, job = folder / "reports", folder / "work"
            reports.mkdir()
            job.mkdir()
            variables = attempt_variables(assignment, base_url)
            if self._modules is not None:
                paths = (self._modules, os.environ.get("PYTHONPATH"))
                variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            if self._plugins is not None:
                key = AttemptKey(assignment.rollout, assignment.attempt)
                around = {**os.environ, **variables}
                variables |= bootstrap_variables(key, base_url, assignment.key, reports, around, self._plugins)
            try:
                ended = await self._ended(
                    {"command": self._command, "folder": str(job), "variables": variables}, recording
                )
            finally:
                await _to_its_end(read_spool, reports, recording)
            return ended

    async def _ended(self, job: Mapping[str, Any], recording: Recording) -> Ended:
        status, failed = None, list[str]()
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(_Output())
            stderr, its_stderr = await _piped(stack, _MOST_ERRORS)
            try:
                async with self._processes.started(output.theirs.fileno(), its_stderr.fileno()) as process:
                    output.theirs.close()
                    its_stderr.close()
                    process.send(job)
                    failed = [message["failed"] async for message in process.messages() if "failed" in message]
                    status = await process.exited
                await asyncio.wait({output.ended, stderr.ended}, timeout=_EXIT_GRACE)
            except ForkerGoneError as error:
                return Ended(Ending.LOST, error=str(error))
            except asyncio.CancelledError:
                if status is None:
                    raise
        if failed:
            return Ended(Ending.CRASHED, error=failed[0])
        if status != 0:
            tail = stderr.text().strip()
            return Ended(
                Ending.CRASHED, error=f"the command {_fate(status)}{f'; the end of its stderr: {tail}' if tail else ''}"
            )
        return finished(_printed(output.of_the_command(recording)))


def _from(folder: Path, argument: str) -> str:
    """The argument of a command; absolute if it names a file in `folder`, or a folder there by a path with a slash."""
    path = os.path.join(folder, argument)
    is_folder = os.path.isdir(path) and (os.sep in argument or argument == os.curdir)
    return path if is_folder or os.path.isfile(path) else argument


@contextlib.contextmanager
def attempt_folder() -> Iterator[Path]:
    """A folder for one attempt; it is removed in the background, for an agent can make that take long, or fail."""
    folder = TemporaryDirectory(prefix="agl-", ignore_cleanup_errors=True)

    def remove() -> None:
        with contextlib.suppress(RecursionError):
            folder.cleanup()

    try:
        yield Path(folder.name)
    finally:
        threading.Thread(target=remove, name="agl-remover").start()


async def _to_its_end(function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Run it in a thread; it ends before this does, also if this is cancelled meanwhile."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})


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
                ended = _ENDED.validate_python(message["ended"])
                if ended.ending not in (Ending.FINISHED, Ending.CRASHED):  # Anything else is for the worker to say.
                    raise ValueError(f"it ended as {ended.ending}")
                return ended
            Report.model_validate(message).add_to(recording)
        except ValidationError as error:
            raise ValueError(f"{error.error_count()} fields are wrong") from error
    return None


class _Tail(asyncio.Protocol):
    """The end of what comes through a pipe."""

    def __init__(self, most: int) -> None:
        self._most, self._kept = most, bytearray()
        self.size = 0
        """Bytes that came."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._kept += data
        self.size += len(data)
        del self._kept[: -self._most]

    @property
    def dropped(self) -> int:
        """Bytes that came before those that are kept."""
        return self.size - len(self._kept)

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
        self._all, self._own = _Tail(_MOST_OUTPUT), _Tail(_MOST_OUTPUT)
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
        if not self._own.text().strip():
            return self._all
        if self._all.size > self._own.size:
            recording.problem(
                "Other processes wrote to the output of the agent's command. That is no part of its result, since the "
                "command printed something itself. A shell script has to start its agent with exec."
            )
        return self._own

    def _read(self) -> None:
        try:
            data, sent_by, _, _ = self._ours.recvmsg(2**16, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._ours)
            self._all.connection_lost(None)
            return
        writer = next((_CREDENTIALS.unpack(found)[0] for _, _, found in sent_by if len(found) == _CREDENTIALS.size), 0)
        self._command = writer if self._command is None else self._command
        self._all.data_received(data)
        if writer == self._command:
            self._own.data_received(data)


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
