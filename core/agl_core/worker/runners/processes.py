"""Processes that end as a whole: the worker's side of the forker."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import orjson

from agl_core.errors import AgentError
from agl_core.wire.keys import OPERATOR_KEY, WORKER_KEY

logger = logging.getLogger(__name__)

_MOST_AT_ONCE = 2**26
"""Bytes of one message of an agent's process."""
_START_PATIENCE = 300.0
"""Seconds that importing the agent may take."""


class ForkerGoneError(RuntimeError):
    """The forker was killed, and every process that it had started with it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a forker."""

    entry: str | None = None
    """The agent; None: commands are run, and nothing is imported."""
    folder: str | None = None
    plugins: list[str] | None = None
    """Plugin files whose adapters, beside the installed ones, are attached; None: none are."""
    preload: bool = True
    """Import the agent once and fork with it; else each process imports it anew."""
    memory: int | None = None
    """Bytes that one process may ask for."""
    path: list[str] = field(default_factory=lambda: [each for each in sys.path if each])
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


class Processes:
    """Starts processes through a forker, of which it keeps one."""

    def __init__(self, setup: Setup, variables: Mapping[str, str]) -> None:
        self._setup, self._variables = setup, dict(variables)
        self._ids = itertools.count()
        self._exited: dict[int, asyncio.Future[int]] = {}
        self._control: socket.socket | None = None
        self._forker: subprocess.Popen[bytes] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the forker, if there is none. AgentError if the agent cannot be imported there."""
        async with self._starting:
            if self._control is not None:
                return
            threads = await self._start_forker()
            if threads > 1 and self._setup.preload:
                logger.warning(
                    "Importing %s starts threads, with which a process cannot be forked safely: each of its processes "
                    "imports it anew, which takes longer. Start threads in the agent's function instead.",
                    self._setup.entry,
                )
                self._setup = replace(self._setup, preload=False)
                await self._stop_forker()
                await self._start_forker()

    async def close(self) -> None:
        """End the forker and with it every process."""
        async with self._starting:
            await self._stop_forker()

    @asynccontextmanager
    async def started(self, *files: int) -> AsyncIterator[Process]:
        """A new process, which gets copies of these file descriptors; at the end it and all it started are ended."""
        await self.start()
        assert self._control is not None
        id, exited = next(self._ids), asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()
        self._exited[id] = exited
        message = json.dumps({"start": id, "files": 1 + len(files)}).encode() + b"\n"
        try:
            with theirs:
                socket.send_fds(self._control, [message], [theirs.fileno(), *files])
        except OSError as error:
            ours.close()
            del self._exited[id]
            raise ForkerGoneError(f"the process that starts agents is gone ({error})") from error
        reader, writer = await asyncio.open_connection(sock=ours, limit=_MOST_AT_ONCE)
        try:
            yield Process(reader, writer, exited)
        finally:
            writer.close()
            await self._end(id, exited)

    async def _end(self, id: int, exited: asyncio.Future[int]) -> None:
        if not exited.done() and self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(json.dumps({"end": id}).encode() + b"\n")
        try:
            await asyncio.wait({exited})
        finally:  # Also where that is cancelled: it may be exiting by itself, and slowly.
            await asyncio.wait({exited})
            exited.exception()
            self._exited.pop(id, None)

    async def _start_forker(self) -> int:
        """Start it and wait until it is ready; returns how many Python threads it has."""
        ours, theirs = socket.socketpair()
        # Agents may know no key of workers and operators, which would let one act for others.
        environment = {name: value for name, value in os.environ.items() if name not in (WORKER_KEY, OPERATOR_KEY)}
        with theirs:
            starting = asyncio.ensure_future(
                asyncio.to_thread(
                    subprocess.Popen,
                    [sys.executable, "-P", "-m", "agl_core.worker.runners.forker", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**environment, **self._variables},
                    start_new_session=True,
                )
            )
            try:
                self._forker = await asyncio.shield(starting)
            except asyncio.CancelledError:  # The thread goes on, and needs the socket until the process has it.
                self._forker = await starting
                ours.close()
                await self._stop_forker()
                raise
        ours.setblocking(False)
        self._control = ours
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(ours, json.dumps(asdict(self._setup)).encode() + b"\n")
        received = b""
        try:
            async with asyncio.timeout(_START_PATIENCE):
                while not received.endswith(b"\n") and (data := await loop.sock_recv(ours, 2**16)):
                    received += data
        except BaseException as error:
            await self._stop_forker()
            if not isinstance(error, TimeoutError | ConnectionError):
                raise
        answer: dict[str, Any] = (
            json.loads(received) if received.endswith(b"\n") else {"failed": "it did not get ready"}
        )
        if "failed" in answer:
            await self._stop_forker()
            raise AgentError(f"A process for the agent cannot be started: {answer['failed']}")
        self._listening = asyncio.create_task(self._listen(ours))
        return int(answer["ready"]["threads"])

    async def _stop_forker(self) -> None:
        control, forker, listening = self._control, self._forker, self._listening
        self._control = self._forker = self._listening = None
        if listening is not None:
            listening.cancel()
            await asyncio.wait({listening})
        if control is not None:
            control.close()
        if forker is not None:
            await asyncio.to_thread(forker.wait)
        self._lose_all()

    async def _listen(self, control: socket.socket) -> None:
        """Note which processes have exited, until the forker has."""
        loop = asyncio.get_running_loop()
        rest = b""
        with contextlib.suppress(ConnectionError):
            while data := await loop.sock_recv(control, 2**16):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    id, status = json.loads(line)["exited"]
                    exited = self._exited.get(id)
                    if exited is not None and not exited.done():
                        exited.set_result(status)
        if self._control is control:
            logger.warning("The process that starts agents was ended from outside; another one is started.")
            self._control = None
            control.close()
            if self._forker is not None:
                await asyncio.to_thread(self._forker.wait)
            self._lose_all()

    def _lose_all(self) -> None:
        for exited in self._exited.values():
            if not exited.done():
                exited.set_exception(ForkerGoneError("the process that starts agents was ended from outside"))
