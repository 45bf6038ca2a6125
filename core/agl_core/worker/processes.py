"""Attempts in processes and folders of their own, which end as a whole; here those of Python agents."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from agl_core.capture import Recording
from agl_core.capture.recording import Report
from agl_core.errors import AgentError
from agl_core.sandbox import launch
from agl_core.types import Ending
from agl_core.wire import OPERATOR_KEY, WORKER_KEY, Assignment
from agl_core.worker.agent import OTHER_KEY, Ended, client_variables

logger = logging.getLogger(__name__)

EXIT_GRACE = 2.0
"""Seconds for a process to exit after its result came, and for its output to end after it exited."""
_MAX_MESSAGE = 2**26
"""Bytes of one message of an agent's process."""
_START_TIMEOUT = 300.0
"""Seconds that importing the agent may take."""
_RESTART_DELAY = 1.0
_PING_EVERY = 2.0
_ANSWER_TIMEOUT = 15.0
"""Seconds for the forker to answer a ping, and to end with all that it started."""
_ENDED = TypeAdapter(Ended)


class ForkerGoneError(RuntimeError):
    """The forker was killed, and every process that it had started with it."""


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """The settings of a forker, known at its start."""

    folder: str
    """Where the agent's module is found too."""
    entry: str | None = None
    """The agent, which is imported once; None: commands are run."""
    plugins: list[str] | None = None
    """Plugin files whose adapters, beside the installed ones, are attached; None: none are."""
    memory: int | None = None
    """Bytes that one process may ask for."""
    workers: bool = False
    """True if the processes are workers, each of which runs many attempts."""
    path: list[str] = field(default_factory=lambda: [folder for folder in sys.path if folder])
    """Where modules are found: the worker's `sys.path`."""


class Process:
    """One started process and the worker's end of its channel, which carries lines of JSON both ways."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, exited: asyncio.Future[int]) -> None:
        self._reader, self._writer = reader, writer
        self.exited = exited
        """Its status, as from waitpid; ForkerGoneError if it is not known. By then, what it left behind has ended."""

    def send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(orjson.dumps(message) + b"\n")

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """The process's messages, until it closes its end of the channel. ValueError for one that is no object."""
        with contextlib.suppress(ConnectionError):
            while line := await self._reader.readline():
                message = orjson.loads(line)
                if not isinstance(message, dict):
                    raise ValueError("a message is not an object")
                yield message


class ForkedProcesses:
    """Starts processes through a forker, of which it keeps one. Nothing of them is ever abandoned.

    `secrets` are the variables that no process of an agent may have, beside the keys of workers and operators.
    """

    default_concurrency = 32

    def __init__(self, setup: ProcessSetup, variables: Mapping[str, str], secrets: Collection[str] = ()) -> None:
        self._setup, self._variables = setup, dict(variables)
        self._secrets = {WORKER_KEY, OPERATOR_KEY, OTHER_KEY, *secrets}
        self._watching: asyncio.Task[None] | None = None
        self._control: socket.socket | None = None
        self._forker: subprocess.Popen[bytes] | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the forker, if there is none. AgentError if the agent cannot be imported there."""
        async with self._starting:
            if self._forker is not None and self._forker.poll() is not None:
                logger.warning("The process that starts agents was ended from outside; another one is started.")
                await self._stop_forker()
            if self._forker is None:
                try:
                    await self._start_forker()
                except BaseException:
                    await self._stop_forker()
                    raise
                self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End the forker and with it every process."""
        if self._watching is not None:
            self._watching.cancel()
        async with self._starting:
            await self._stop_forker()

    @contextlib.asynccontextmanager
    async def started(self, *files: int) -> AsyncIterator[Process]:
        """A new process, which gets copies of these file descriptors; at the end it and all it started are ended."""
        await self.start()
        assert self._control is not None
        leash, its_leash = socket.socketpair()
        channel, its_channel = socket.socketpair()
        leash.setblocking(False)
        with leash:
            try:
                with its_leash, its_channel:
                    socket.send_fds(self._control, [b"\n"], [its_leash.fileno(), its_channel.fileno(), *files])
            except OSError as error:
                channel.close()
                raise ForkerGoneError(f"the process that starts agents is gone ({error})") from error
            reader, writer = await asyncio.open_connection(sock=channel, limit=_MAX_MESSAGE)
            exited = asyncio.create_task(_status(leash))
            try:
                yield Process(reader, writer, exited)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    leash.shutdown(socket.SHUT_WR)
                try:
                    await asyncio.wait({exited})
                finally:  # Also where that is cancelled: it may be exiting by itself, and slowly.
                    await asyncio.wait({exited})
                    exited.exception()

    async def _start_forker(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in self._secrets}
        program, setup = ("-P", "-m", "agl_core.worker.forker"), json.dumps(asdict(self._setup))
        control, self._forker = launch(*program, setup, env={**environment, **self._variables})
        control.setblocking(False)
        self._control = control
        received = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(_START_TIMEOUT):
                loop = asyncio.get_running_loop()
                while not received.endswith(b"\n") and (data := await loop.sock_recv(control, 2**16)):
                    received += data
        is_whole = received.endswith(b"\n")
        reply: dict[str, Any] = json.loads(received) if is_whole else {"failed": "it did not get ready"}
        if "failed" in reply:
            raise AgentError(f"A process for the agent cannot be started: {reply['failed']}")
        if reply["ready"]["imports_anew"]:
            logger.warning(
                "Importing %s starts threads, with which a process cannot be forked safely: each of its processes "
                "imports it anew, which takes longer. Start threads in the agent's function instead.",
                self._setup.entry,
            )

    async def _stop_forker(self) -> None:
        control, forker = self._control, self._forker
        self._control = self._forker = None
        if control is not None:
            control.close()
        if forker is not None:
            forker.send_signal(signal.SIGCONT)
            try:
                await asyncio.to_thread(forker.wait, _ANSWER_TIMEOUT)
            except subprocess.TimeoutExpired:
                forker.kill()
                await asyncio.to_thread(forker.wait)

    async def _watch(self) -> None:
        """Let a forker go on that an agent's tool stopped, and end one that does not answer all the same."""
        loop, control, forker, missed = asyncio.get_running_loop(), self._control, self._forker, 0
        assert control is not None
        assert forker is not None
        with contextlib.suppress(OSError):  # It was ended here.
            while missed < 2:  # An event loop that stood still may miss one.
                forker.send_signal(signal.SIGCONT)
                try:
                    async with asyncio.timeout(_ANSWER_TIMEOUT):
                        await loop.sock_sendall(control, b"?")
                        if not await loop.sock_recv(control, 1):
                            return
                    missed = 0
                    await asyncio.sleep(_PING_EVERY)
                except TimeoutError:
                    missed += 1
            logger.warning("The process that starts agents does not answer: it is ended, and another one is started.")
            forker.kill()


async def _status(leash: socket.socket) -> int:
    """The status of a process, once it has exited. ForkerGoneError if it was not started, or its status is lost."""
    received = await asyncio.get_running_loop().sock_recv(leash, 2**16)
    reply: dict[str, Any] = json.loads(received or b"{}")
    if "exited" not in reply:
        raise ForkerGoneError(reply.get("failed", "the process that starts agents was ended from outside"))
    return int(reply["exited"])


class ProcessPerAttempt(ForkedProcesses):
    """Runs each attempt of a Python agent in a process of its own, which is a fork of the forker.

    Since the forker has imported the agent, a start takes milliseconds. When time is up, the process and everything
    that it started are ended. Its working folder is empty and the attempt's own. `plugins` are files whose adapters
    are attached there, beside the installed ones (None: none are); `memory` is in bytes.
    """

    def __init__(
        self,
        entry: str,
        folder: Path,
        *,
        base_url: str,
        plugins: Sequence[Path] | None = (),
        memory: int | None = None,
        secrets: Collection[str] = (),
    ) -> None:
        files = None if plugins is None else [str(path) for path in plugins]
        super().__init__(ProcessSetup(str(folder), entry, files, memory), client_variables(base_url), secrets)

    async def run(self, assignment: Assignment, base_url: str, recording: Recording) -> Ended:
        ended: Ended | None = None
        with attempt_folder() as folder:
            try:
                async with self.started() as process:
                    job = {"assignment": assignment.model_dump(mode="json"), "base_url": base_url}
                    process.send({**job, "folder": str(folder)})
                    ended = await _ended(process, recording)
                    await asyncio.wait({process.exited}, timeout=EXIT_GRACE)
            except ForkerGoneError as error:
                return Ended(Ending.LOST, error=str(error))
            except asyncio.CancelledError:
                if ended is None:
                    raise
        return ended


async def _ended(process: Process, recording: Recording) -> Ended:
    """How the agent ended, as soon as that is known; its process may still be exiting. Its reports are recorded."""
    try:
        async for message in process.messages():
            if "ended" in message:
                ended = _ENDED.validate_python(message["ended"])
                if ended.ending not in (Ending.FINISHED, Ending.CRASHED):  # Anything else is for the worker to say.
                    raise ValueError(f"it ended as {ended.ending}")
                return ended
            Report.model_validate(message).add_to(recording)
    except ValueError as error:
        problem = f"{error.error_count()} fields are wrong" if isinstance(error, ValidationError) else error
        return Ended(Ending.CRASHED, error=f"what the agent's process sent cannot be read ({problem})")
    return Ended(Ending.CRASHED, error=f"the agent's process {fate(await process.exited)} before it had a result")


class WorkerProcesses(ForkedProcesses):
    """Workers of an async agent, each in a process of its own, so that agents do not share the trainer's interpreter.

    One that ends before the run is over is replaced; what it ran is tried again once the server misses its heartbeats.
    """

    def __init__(
        self,
        setup: ProcessSetup,
        base_url: str,
        worker_key: str,
        *,
        concurrency: Sequence[int],
        secrets: Collection[str] = (),
    ) -> None:
        """`concurrency` has the rollouts of each worker at the same time."""
        super().__init__(setup, client_variables(base_url), secrets)
        self.problems: Counter[str] = Counter()
        """Failures of adapters, by message."""
        self._jobs = [{"base_url": base_url, "key": worker_key, "concurrency": most} for most in concurrency]
        self._working: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Import the agent and begin to work, in the background."""
        self._working = asyncio.create_task(self._work())

    @property
    def alive(self) -> bool:
        return self._working is not None and not self._working.done()

    async def stop(self) -> None:
        """Give back what runs and end all workers; calling it again changes nothing."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait({self._working})
        await self.close()

    async def _work(self) -> None:
        try:
            async with asyncio.TaskGroup() as workers:
                for job in self._jobs:
                    workers.create_task(self._keep(job))
        except* AgentError as errors:
            logger.error("The workers stopped. %s", errors.exceptions[0])

    async def _keep(self, job: Mapping[str, Any]) -> None:
        """Have a worker in a process until the run is over."""
        while True:
            try:
                async with self.started() as process:
                    process.send(job)
                    async for message in process.messages():
                        self._take(message)
                    status = await process.exited
                if status == 0:
                    return
                ended = fate(status)
            except (ForkerGoneError, ValueError) as error:
                ended = f"was lost ({error})"
            logger.warning("A worker's process %s; another one is started.", ended)
            await asyncio.sleep(_RESTART_DELAY)

    def _take(self, message: Mapping[str, Any]) -> None:
        if "failed" in message:
            raise AgentError(message["failed"])
        if "log" in message:
            name, level, text = message["log"]
            logging.getLogger(name).log(level, "%s", text)
        else:
            self.problems[message["problem"]] += 1


@contextlib.contextmanager
def attempt_folder() -> Iterator[Path]:
    """A folder for one attempt; it is removed in the background, for an agent can make that take long, or fail."""
    folder = TemporaryDirectory(prefix="agl-", ignore_cleanup_errors=True)

    def remove() -> None:
        with contextlib.suppress(RecursionError):
            folder.cleanup()
        if Path(folder.name).exists():  # Python needs a call and an open file for each level; these do not.
            for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
                subprocess.run([*command, "--", folder.name], stderr=subprocess.DEVNULL, check=False)

    try:
        yield Path(folder.name)
    finally:
        threading.Thread(target=remove, name="agl-remover").start()


def fate(status: int) -> str:
    """The end of a process in words, by its status from waitpid."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
