"""Attempts of agents that are commands: the process of each, and the result in its output."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import orjson

from agl_core.capture import Recording
from agl_core.capture.attaching import bootstrap_variables
from agl_core.capture.recording import read_spool
from agl_core.errors import AgentError
from agl_core.types import AttemptKey, Ending
from agl_core.types.forms import parse_json
from agl_core.wire import MAX_RESULT, Assignment
from agl_core.worker.agent import Ended, attempt_variables, finished
from agl_core.worker.processes import EXIT_GRACE, ForkedProcesses, ForkerGoneError, ProcessSetup, attempt_folder, fate

_MAX_TEXT = 1 << 20
"""Characters of the end of a command's output as its result, if the last line is no JSON; JSON writes one as six bytes
at most."""
_MAX_ERRORS = 2000
"""Bytes that are kept of the stderr of a command that failed."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group (struct ucred)."""


class CommandPerAttempt(ForkedProcesses):
    """Runs a command for each attempt, with the attempt in its environment, in an empty folder of the attempt's own.

    Arguments that name a file in `folder` are made absolute, and for -m and -c, Python finds modules there. The
    result is the last line that the command prints if that is JSON, else its output. Of an output of more than 1 MiB
    the end is kept, with a note. What other processes print counts only if the command itself prints nothing.
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
        secrets: Collection[str] = (),
    ) -> None:
        program, *arguments = command
        # A name with a slash is a path from the folder.
        if shutil.which(folder / program if os.path.dirname(program) else program) is None:
            raise AgentError(
                f"agent.command: there is no program '{program}' to run, neither on the PATH nor relative to "
                f"{folder}. Install it, or write its whole path."
            )
        folder = folder.absolute()
        program = str(folder / program) if os.path.dirname(program) else program
        self._command = [program, *(_from(folder, argument) for argument in arguments)]
        self._modules = str(folder) if {"-m", "-c"} & set(arguments) else None
        self._plugins = plugins
        super().__init__(ProcessSetup(str(folder), memory=memory), {}, secrets)

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
                await asyncio.to_thread(read_spool, reports, recording)

    async def _ended(self, job: Mapping[str, Any], recording: Recording) -> Ended:
        status, failures = None, list[str]()
        with TemporaryFile() as stderr, _Output() as output:
            try:
                async with self.started(output.theirs.fileno(), stderr.fileno()) as process:
                    output.theirs.close()
                    process.send(job)
                    failures = [message["failed"] async for message in process.messages() if "failed" in message]
                    status = await process.exited
                await asyncio.wait({output.ended}, timeout=EXIT_GRACE)
            except ForkerGoneError as error:
                return Ended(Ending.LOST, error=str(error))
            except asyncio.CancelledError:
                if status is None:
                    raise
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _MAX_ERRORS))
            tail = stderr.read(_MAX_ERRORS).decode(errors="replace").strip()
        if failures:
            return Ended(Ending.CRASHED, error=failures[0])
        if status != 0:
            its_end = f"; the end of its stderr: {tail}" if tail else ""
            return Ended(Ending.CRASHED, error=f"the command {fate(status)}{its_end}")
        return finished(_printed(output.of_the_command(recording)))


def _from(folder: Path, argument: str) -> str:
    """The argument of a command; absolute if it names a file in `folder`, or a folder there by a path with a slash."""
    path = os.path.join(folder, argument)
    is_folder = os.path.isdir(path) and (os.sep in argument or argument == os.curdir)
    return path if is_folder or os.path.isfile(path) else argument


class _Tail:
    """The last `MAX_RESULT` bytes of what was printed."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self.size = 0
        """Bytes that came."""

    def add(self, data: bytes) -> None:
        self._kept += data
        self.size += len(data)
        del self._kept[:-MAX_RESULT]

    @property
    def dropped(self) -> int:
        """Bytes that came before those that are kept."""
        return self.size - len(self._kept)

    def text(self) -> str:
        return self._kept.decode(errors="replace").strip()


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
        self._all, self._own = _Tail(), _Tail()
        self._command: int | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> _Output:
        asyncio.get_running_loop().add_reader(self._ours, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._ours)
        self._ours.close()
        self.theirs.close()

    def of_the_command(self, recording: Recording) -> _Tail:
        """The output of its own process, if there is any, else all output."""
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
            self.ended.set_result(None)
            return
        pids = [_CREDENTIALS.unpack(sent)[0] for _, _, sent in ancillary if len(sent) == _CREDENTIALS.size]
        writer = pids[0] if pids else 0
        self._command = writer if self._command is None else self._command
        self._all.add(data)
        if writer == self._command:
            self._own.add(data)


def _printed(output: _Tail) -> object:
    """The result of a command that printed this."""
    text = output.text()
    try:
        return parse_json(text.rpartition("\n")[2])
    except orjson.JSONDecodeError:
        kept = text[-_MAX_TEXT:]
        left_out = output.dropped + len(text) - len(kept)
        note = f"(of its output, {left_out} characters more, which came before, were not kept)\n"
        return f"{note}{kept}" if left_out else kept or None
