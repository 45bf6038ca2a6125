"""The process that starts agents' processes, by forking itself, and ends each with everything that it started.

    worker ──socket──▶ forker (single-threaded, the agent imported) ──fork──▶ one process per attempt

It is a program of its own: a worker has threads, and a forked process with threads may hang. Messages are lines of
JSON. The worker gets `{"ready": …}` or `{"failed": reason}` once. Then a byte that it sends alone is a ping, which is
answered. One with file descriptors, a leash and those that the process gets, asks for a process. That is ended when the
worker shuts its side of the leash down. Over the leash comes `{"exited": status}` with the status from waitpid once
nothing of the process is left, or `{"failed": reason}` if there could be none. When the worker is gone, everything that
was started for it is ended.

On Linux nothing escapes: each process adopts its orphaned descendants, also those in sessions of their own, and the
forker adopts what such a process leaves behind. Elsewhere the process group is ended.

A forked process gets its job as one line over the first of its file descriptors. It calls the agent, sends
`{"tool_result": …}`, `{"reward": …}` and `{"problem": …}` as they happen, and at last
`{"ended": {"ending", "result", "error"}}`. Or it becomes a command, and sends `{"failed": reason}` if it cannot. Or it
is a worker beside the trainer, whose attempts of an async agent are tasks, and sends `{"log": …}` and `{"problem": …}`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import json
import logging
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import httpx
import orjson

from agl_core.capture import Recording, attach, installed_adapters, running
from agl_core.errors import AglError
from agl_core.plugins import Plugins
from agl_core.sandbox_process import PR_SET_PDEATHSIG, fork, prctl
from agl_core.wire import Assignment
from agl_core.worker.agent import (
    Agent,
    TaskPerAttempt,
    active_attempt,
    attempt_variables,
    crashed,
    finished,
    load_agent,
)
from agl_core.worker.client import LightningClient
from agl_core.worker.processes import ProcessSetup
from agl_core.worker.worker import Worker, until_signal

_TERM_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL."""
_MAX_FILES = 4
_IMPORT_ANEW = "import-anew"
_MESSAGES = [{"role": "user", "content": "-"}]
_REPLY = {"choices": [{"message": {"tool_calls": [{"type": "function", "function": {}}]}}], "usage": {}, "content": []}
_FIRST_CALLS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "openai": lambda openai, settings: openai.OpenAI(**settings).chat.completions.create(model="-", messages=_MESSAGES),
    "anthropic": lambda anthropic, settings: anthropic.Anthropic(**settings).messages.create(
        model="-", max_tokens=1, messages=_MESSAGES
    ),
}
"""A call of each client library, by its module."""
_PR_SET_CHILD_SUBREAPER = 36
"""A subreaper becomes the parent of every descendant whose own parent ends."""


def main() -> None:
    """`python -m agl_core.worker.forker SETUP FD`: serve the worker at that socket's other end, until it is gone."""
    setup, control = ProcessSetup(**json.loads(sys.argv[1])), socket.socket(fileno=int(sys.argv[2]))
    sys.path[:] = setup.path
    agent, imports_anew = None, _IMPORT_ANEW in sys.argv
    if setup.entry is not None and not imports_anew:
        try:
            agent = _load(setup)
        except Exception as error:
            reason = str(error) if isinstance(error, AglError) else f"{type(error).__name__}: {error}"
            _send(control, {"failed": reason})
            return
        if threading.active_count() > 1:  # It cannot be forked safely: begin anew, without the import.
            os.execv(sys.executable, [*sys.orig_argv, _IMPORT_ANEW])
    _warm_up()
    gc.freeze()  # No fork should collect what is imported here: its pages stay shared.
    _send(control, {"ready": {"imports_anew": imports_anew}})
    _Forker(control, setup, agent).serve()


def _load(setup: ProcessSetup) -> Agent:
    """Attach adapters, then import the agent."""
    assert setup.entry is not None
    if setup.plugins is not None:
        attach(installed_adapters(Plugins.load([Path(path) for path in setup.plugins])))
    return load_agent(setup.entry, Path(setup.folder))


def _warm_up() -> None:
    """Have the clients that the agent imported make a call here, to a mock transport.

    A client imports and builds most of what it needs at its first call; each fork would do that again: 50 ms of CPU
    time for openai's, 30 more than LangChain needs itself.
    """
    for library, call in _FIRST_CALLS.items():
        if library in sys.modules:
            transport = httpx.MockTransport(lambda _: httpx.Response(200, json=_REPLY))
            with contextlib.suppress(Exception), httpx.Client(transport=transport) as http:
                call(sys.modules[library], {"api_key": "-", "base_url": "http://agl", "http_client": http})
    "agl".encode("idna")


class _Forker:
    def __init__(self, control: socket.socket, setup: ProcessSetup, agent: Agent | None) -> None:
        self._control, self._setup, self._agent = control, setup, agent
        self._leashes: dict[int, socket.socket] = {}
        """By the pid of each process that leads a tree."""
        self._kill_at: dict[int, float] = {}
        """When the trees that are to end are killed; infinite once they were."""

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            prctl(_PR_SET_CHILD_SUBREAPER, 1)
        woken, wake = os.pipe()
        for file in (woken, wake):
            os.set_blocking(file, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        connected = True
        while connected:
            held = {leash.fileno(): pid for pid, leash in self._leashes.items() if pid not in self._kill_at}
            poll = select.poll()
            for file in (self._control.fileno(), woken, *held):
                poll.register(file, select.POLLIN)
            seconds = min(self._kill_at.values(), default=math.inf) - time.monotonic()
            for file, _ in poll.poll(None if seconds == math.inf else max(0.0, seconds * 1000)):
                if file == woken:
                    os.read(woken, 4096)
                elif file in held:
                    _signal_tree(held[file], signal.SIGTERM)
                    self._kill_at[held[file]] = time.monotonic() + _TERM_GRACE
                else:
                    connected = self._receive()
            self._kill_overdue()
            self._reap()
        for pid in self._leashes:
            _signal_tree(pid, signal.SIGKILL)
        self._leashes.clear()
        with contextlib.suppress(ChildProcessError):
            while True:  # Their own children then become children of this process.
                self._end_orphans()
                os.waitpid(-1, 0)

    def _receive(self) -> bool:
        """Start a process, or answer a ping; False if the worker is gone."""
        try:
            asked, files, _, _ = socket.recv_fds(self._control, 1, _MAX_FILES)
            if asked and not files:
                self._control.sendall(asked)
        except ConnectionError:
            return False
        if not files:
            return bool(asked)
        for file in files:
            os.set_inheritable(file, False)
        leash, own = socket.socket(fileno=files[0]), files[1:]
        try:
            pid = fork()
        except OSError as error:
            _send(leash, {"failed": f"no process could be started ({error})"})
            leash.close()
        else:
            self._leashes[pid] = leash
            if pid == 0:
                self._become(own)
        for file in own:
            os.close(file)
        return True

    def _become(self, files: list[int]) -> NoReturn:
        """Lead a tree of processes, which ends with the forker, and do the job that comes over the first of `files`."""
        try:
            os.setsid()
            with contextlib.suppress(OSError):
                prctl(_PR_SET_CHILD_SUBREAPER, int(not self._setup.workers))
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for connection in (self._control, *self._leashes.values()):
                connection.close()
            if self._setup.memory is not None:
                resource.setrlimit(resource.RLIMIT_DATA, (self._setup.memory, self._setup.memory))
            channel = socket.socket(fileno=files[0])
            with channel.makefile("rb") as lines:
                job = orjson.loads(lines.readline())
            if "command" in job:
                _send(channel, {"failed": _execute(job, *files[1:])})
            elif self._setup.workers:
                _run_worker(self._setup, self._agent, job, channel)
            else:
                _run_agent(self._setup, self._agent, job, channel)
        finally:
            os._exit(1)

    def _kill_overdue(self) -> None:
        for pid in [pid for pid, at in self._kill_at.items() if at <= time.monotonic()]:
            _signal_tree(pid, signal.SIGKILL)
            self._kill_at[pid] = math.inf

    def _reap(self) -> None:
        """Report which processes have exited, and end what they left behind."""
        exited: list[tuple[socket.socket, int]] = []
        any_ended = False
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG | os.WUNTRACED))[0]:
                pid = ended[0]
                if os.WIFSTOPPED(ended[1]):  # A tool of an agent may have done it, and would hold up a worker.
                    os.kill(pid, signal.SIGCONT)
                    continue
                any_ended = True
                if pid in self._leashes:  # While its process group has others, no new one gets that number.
                    _signal_tree(pid, signal.SIGKILL)
                    exited.append((self._leashes.pop(pid), ended[1]))
                    self._kill_at.pop(pid, None)
        if exited or (any_ended and not self._setup.workers):  # What tools left lives as long as their worker.
            self._end_orphans()
        for leash, status in exited:
            _send(leash, {"exited": status})
            leash.close()

    def _end_orphans(self) -> None:
        """Kill what has become a child of this process because the root of its tree is gone."""
        for pid in _children():
            if pid not in self._leashes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def _execute(job: dict[str, Any], stdout: int, stderr: int) -> str:
    """Become the command; returns why that is not possible."""
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.write(1, b"\n")  # Tells the worker which process this is.
        os.chdir(job["folder"])
        os.environ.update(job["variables"])
        os.execvp(job["command"][0], job["command"])
    except (OSError, ValueError) as error:
        return f"the command could not be run ({error})"


class _LogForwarder(logging.Handler):
    """Sends what a worker logs to the run."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        _send(self._channel, {"log": [record.name, record.levelno, self.format(record)]})


def _run_worker(setup: ProcessSetup, agent: Agent | None, job: dict[str, Any], channel: socket.socket) -> None:
    """Be a worker for the agent, imported here if it is None, until the run is over or this process is to end."""
    if not logging.root.handlers:
        logging.root.addHandler(_LogForwarder(channel))
    _draw_anew()

    async def work() -> signal.Signals | None:
        async with LightningClient(job["base_url"], job["key"]) as client:
            runner = TaskPerAttempt(agent or _load(setup))
            worker = Worker(client, runner, concurrency=job["concurrency"])
            worker.on_problem = lambda text: _send(channel, {"problem": text})
            return await until_signal(worker.run())

    try:
        os._exit(0 if asyncio.run(work()) is None else 1)
    except AglError as error:
        _send(channel, {"failed": str(error)})


def _draw_anew() -> None:
    """Forks would draw the same numbers from numpy; Python itself takes care of `random`."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _run_agent(setup: ProcessSetup, agent: Agent | None, job: dict[str, Any], channel: socket.socket) -> None:
    """Call the agent, imported here if it is None, and exit."""
    os.chdir(job["folder"])
    _draw_anew()
    assignment, base_url = Assignment.model_validate(job["assignment"]), job["base_url"]
    os.environ.update(attempt_variables(assignment, base_url))
    sending = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        with sending, contextlib.suppress(OSError):  # The worker is gone.
            channel.sendall(orjson.dumps(message) + b"\n")

    recording = Recording(lambda report: send(report.model_dump(mode="json", exclude_none=True)))
    try:
        with running(active_attempt(assignment, base_url, recording)):
            agent = agent or _load(setup)
            result = agent.call(assignment, base_url)
            ended = finished(asyncio.run(result) if asyncio.iscoroutine(result) else result)
    except BaseException as error:
        ended = crashed(error)
    recording.close()
    send({"ended": asdict(ended)})
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # The worker is gone; the next read shows it.
        connection.sendall(json.dumps(message).encode() + b"\n")


def _signal_tree(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that leads a tree, and to its group; what has left the group follows when it ends."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _children() -> list[int]:
    """The processes whose parent this one is, by birth or adoption (Linux; elsewhere none are adopted)."""
    with contextlib.suppress(OSError):  # It may miss one while another exits; that is then reaped, and this read again.
        return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]
    children = []
    if sys.platform == "linux":
        parent = str(os.getpid()).encode()
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    # pid (command) state parent …; a command may contain anything.
                    if Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()[1] == parent:
                        children.append(int(name))
    return children


if __name__ == "__main__":
    main()
