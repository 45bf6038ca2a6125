"""The parent's side of a fork server: starting it, watching it, and having processes started by it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import orjson

from agl_core.errors import AgentError

logger = logging.getLogger(__name__)

_MAX_MESSAGE = 2**26
"""Bytes of one message of a process."""
_START_TIMEOUT = 300.0
"""Seconds that importing may take."""
_PING_EVERY = 2.0
_ANSWER_TIMEOUT = 15.0
"""Seconds for the fork server to answer a ping, and to end with all that it started."""


class NoProcessError(RuntimeError):
    """There could be no process; or the fork server was killed, and every process that it had started with it."""


def request(
    function: Callable[..., Any], *others: Callable[..., Any], prepare: Sequence[Any] | None = None
) -> dict[str, Any]:
    """A request for a process that calls `function`; all functions are those of modules, imported before the fork.

    `prepare`, such a function and its JSON arguments, is called before the fork too, to fill caches.
    """
    return {
        "path": [folder for folder in sys.path if folder],
        "functions": [named(each) for each in (function, *others)],
        "prepare": prepare and [named(prepare[0]), *prepare[1:]],
    }


def named(function: Callable[..., Any]) -> tuple[str, str | None, str]:
    """Module, file and name, by which another process finds the function."""
    return function.__module__, getattr(sys.modules[function.__module__], "__file__", None), function.__qualname__


class Process:
    """One started process and the parent's end of its channel, which carries lines of JSON both ways."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, exited: asyncio.Future[int]) -> None:
        self._reader, self._writer = reader, writer
        self.exited = exited
        """Its status, as from waitpid; NoProcessError if it is not known. By then, what it left behind has ended."""

    def send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(orjson.dumps(message) + b"\n")

    async def lines(self) -> AsyncIterator[bytes]:
        """The lines that the process sends, until it closes its end of the channel. ValueError if one is too long."""
        with contextlib.suppress(ConnectionError):
            while line := await self._reader.readline():
                yield line

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """The lines as messages. ValueError for one that is no object."""
        async for line in self.lines():
            message = orjson.loads(line)
            if not isinstance(message, dict):
                raise ValueError("a message is not an object")
            yield message


class ForkServer:
    """Keeps a fork server and starts processes through it, for several event loops; none is ever abandoned."""

    def __init__(
        self,
        environment: Mapping[str, str],
        first: Mapping[str, Any],
        *,
        memory: int | None = None,
        grace: float = 2.0,
        adopt: bool = True,
        **options: Any,
    ) -> None:
        """The server gets ready for the request `first`; `options` are those of Popen.

        A process may have `memory` bytes, and gets `grace` seconds between SIGTERM and SIGKILL. Orphans that it does
        not `adopt` live as long as the server, or until another process exits.
        """
        self._environment, self._first, self._options = dict(environment), dict(first), options
        self._processes = {"memory": memory, "grace": grace, "adopt": adopt}
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None
        self._stopping = threading.Event()
        self._is_closed = False

    async def start(self) -> None:
        """Start the server, if none is running. AgentError if it cannot import what it is to call."""
        if self._watcher is None or self._server is None or self._server.poll() is not None:
            try:
                await asyncio.to_thread(self._start)
            except asyncio.CancelledError:
                await asyncio.to_thread(self._stop)
                raise

    async def close(self) -> None:
        """End the server for good, and with it every process."""
        self._is_closed = True
        await asyncio.to_thread(self._stop)

    @contextlib.asynccontextmanager
    async def started(
        self, *files: int, asked: Mapping[str, Any] | None = None, max_message: int = _MAX_MESSAGE
    ) -> AsyncIterator[Process]:
        """A new process with copies of these file descriptors; at the end it and all it started are ended.

        `asked` is its request, by default the first one, for which the server is ready.
        """
        await self.start()
        leash, its_leash = socket.socketpair()
        channel, its_channel = socket.socketpair()
        with leash:
            leash.sendall(orjson.dumps(asked or {**self._first, "path": None, "prepare": None}) + b"\n")
            leash.setblocking(False)
            try:
                with its_leash, its_channel:
                    assert self._control is not None
                    socket.send_fds(self._control, [b"\n"], [its_leash.fileno(), its_channel.fileno(), *files])
            except OSError as error:
                channel.close()
                raise NoProcessError(f"the process that starts others is gone ({error})") from error
            reader, writer = await asyncio.open_connection(sock=channel, limit=max_message)
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

    def _start(self) -> None:
        with self._lock:
            if self._is_closed:
                raise AgentError("A process for the agent cannot be started: the worker has ended.")
            if self._server is not None:
                if self._server.poll() is None:
                    return
                logger.warning("The process that starts others was ended from outside; another one is started.")
                self._end()
            if self._launch():
                logger.warning(
                    "Importing %s starts threads, with which a process cannot be forked safely: each of its processes "
                    "imports it anew, which takes longer. Start threads in the agent's function instead.",
                    self._first["prepare"][1],
                )
                self._end()
                self._first["prepare"] = None
                self._launch()
            assert self._control is not None
            self._control.setblocking(False)
            self._stopping = threading.Event()
            watching = (self._control, self._server, self._stopping)
            self._watcher = threading.Thread(target=_watch, args=watching, daemon=True, name="agl-fork-server")
            self._watcher.start()

    def _launch(self) -> int:
        """Run a server, until it is ready; returns how many threads it has that no fork would have."""
        setup = json.dumps({"request": self._first, "processes": self._processes})
        self._control, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "agl_core.processes.server", setup, str(theirs.fileno())],
                env=self._environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is meant for the run.
                **self._options,
            )
        self._control.settimeout(_START_TIMEOUT)
        received = b""
        with contextlib.suppress(OSError), self._control.makefile("rb") as lines:
            received = lines.readline()
        reply: dict[str, Any] = json.loads(received or b'{"failed": "it did not get ready"}')
        if "failed" in reply:
            self._end()
            raise AgentError(f"A process for the agent cannot be started: {reply['failed']}")
        return int(reply["threads"]) if self._first["prepare"] else 0

    def _hang_up(self) -> None:
        if (control := self._control) is not None:
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)

    def _stop(self) -> None:
        self._hang_up()  # Before it has the lock: that ends a start which is under way.
        with self._lock:
            self._end()

    def _end(self) -> None:
        control, server, watcher = self._control, self._server, self._watcher
        if control is None or server is None:
            return
        self._stopping.set()
        self._hang_up()
        server.send_signal(signal.SIGCONT)
        try:
            server.wait(_ANSWER_TIMEOUT)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        if watcher is not None:
            watcher.join()
        control.close()
        self._control = self._server = self._watcher = None


def _watch(control: socket.socket, server: subprocess.Popen[bytes], stopping: threading.Event) -> None:
    """Let a server go on that an agent's tool stopped, and end one that does not answer all the same."""
    answers, missed = select.poll(), 0
    answers.register(control, select.POLLIN)
    with contextlib.suppress(OSError):  # It has ended.
        while missed < 2:  # A machine that stood still may miss one.
            if stopping.wait(_PING_EVERY):
                return
            server.send_signal(signal.SIGCONT)
            control.send(b"?")
            answered = answers.poll(_ANSWER_TIMEOUT * 1000)
            if answered and not control.recv(16):
                return
            missed = 0 if answered else missed + 1
        logger.warning("The process that starts others does not answer: it is ended, and another one is started.")
        server.kill()


async def _status(leash: socket.socket) -> int:
    """The status of a process, once it has exited. NoProcessError if there was none, or its status is lost."""
    received = await asyncio.get_running_loop().sock_recv(leash, 2**16)
    reply: dict[str, Any] = json.loads(received or b"{}")
    if "exited" not in reply:
        raise NoProcessError(reply.get("failed", "the process that starts others was ended from outside"))
    return int(reply["exited"])


def fate(status: int) -> str:
    """The end of a process in words, by its status from waitpid."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
