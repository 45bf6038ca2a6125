"""The process that starts agents' processes, by forking itself, and ends each with everything that it started.

    worker ──socket──▶ forker (single-threaded, the agent imported) ──fork──▶ one process per attempt

It is a program of its own: a worker has threads, and a forked process with threads may hang. Messages are lines of
JSON. The worker sends `{"start": id, "files": n}` with n file descriptors, and `{"end": id}`. It gets `{"ready": …}` or
`{"failed": reason}` once, and `{"exited": [id, status]}` for each process, with the status from waitpid. When the
worker is gone, everything that was started for it is ended.

On Linux nothing escapes: each process adopts its orphaned descendants, also those in sessions of their own, and the
forker adopts what such a process leaves behind. Elsewhere the process group is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

from agl_core.capture import attach, installed_adapters
from agl_core.errors import AglError
from agl_core.plugins import Plugins
from agl_core.worker.agent import Agent, load_agent
from agl_core.worker.runners.child import run_job
from agl_core.worker.runners.processes import Setup

_TERM_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL."""
_MOST_FILES = 3
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """`python -m agl_core.worker.runners.forker FD`: serve the worker at that socket's other end, until it is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    with control.makefile("rb") as lines:
        told = lines.readline()
    if not told.endswith(b"\n"):
        return  # The worker is gone: it had nothing to run.
    setup = Setup(**json.loads(told))
    sys.path[:] = setup.path
    agent = None
    if setup.preload:
        try:
            agent = load_prepared(setup)
        except Exception as error:
            reason = str(error) if isinstance(error, AglError) else f"{type(error).__name__}: {error}"
            _send(control, {"failed": reason})
            return
    gc.freeze()  # No fork should collect what is imported here: its pages stay shared.
    _send(control, {"ready": {"threads": threading.active_count()}})
    _Forker(control, setup, agent).serve()


def load_prepared(setup: Setup) -> Agent | None:
    """Attach adapters, then import the agent; None if commands are run instead."""
    if setup.entry is None:
        return None
    if setup.plugins is not None:
        attach(installed_adapters(Plugins.load([Path(each) for each in setup.plugins])))
    return load_agent(setup.entry, Path(setup.folder) if setup.folder else None)


class _Forker:
    def __init__(self, control: socket.socket, setup: Setup, agent: Agent | None) -> None:
        self._control, self._setup, self._agent = control, setup, agent
        self._ids: dict[int, int] = {}
        """By the pid of each process that leads a tree."""
        self._kill_at: dict[int, float] = {}
        self._received, self._files = b"", list[int]()

    def serve(self) -> None:
        _adopt_orphans()
        woken, wake = os.pipe()
        for each in (woken, wake):
            os.set_blocking(each, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        connected = True
        while connected:
            readable, _, _ = select.select([self._control.fileno(), woken], [], [], self._patience())
            if woken in readable:
                os.read(woken, 4096)
            if self._control.fileno() in readable:
                connected = self._receive()
            self._kill_overdue()
            self._reap()
        for pid in self._ids:
            _signal_tree(pid, signal.SIGKILL)
        self._ids.clear()
        while left := _children_of_this():  # Their own children then become children of this process.
            self._end_orphans()
            for pid in left:
                os.waitpid(pid, 0)

    def _patience(self) -> float | None:
        return max(0.0, min(self._kill_at.values()) - time.monotonic()) if self._kill_at else None

    def _receive(self) -> bool:
        """Carry out the worker's messages; False if it is gone."""
        try:
            data, files, _, _ = socket.recv_fds(self._control, 2**16, _MOST_FILES)
        except ConnectionError:
            return False
        for each in files:
            os.set_inheritable(each, False)
        self._files += files
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "start" in message:
                taken, self._files = self._files[: message["files"]], self._files[message["files"] :]
                self._start(message["start"], taken)
            else:
                self._end(message["end"])
        return bool(data)

    def _start(self, id: int, files: list[int]) -> None:
        try:
            pid = _fork()
        except OSError as error:
            with contextlib.suppress(OSError):
                os.write(files[0], json.dumps({"failed": f"no process could be started ({error})"}).encode() + b"\n")
            _send(self._control, {"exited": [id, 0]})
        else:
            if pid == 0:
                self._become(files)
            self._ids[pid] = id
        for each in files:
            os.close(each)

    def _become(self, files: list[int]) -> NoReturn:
        """What the forked process does instead of serving."""
        try:
            _lead_tree()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            if self._setup.memory is not None:
                resource.setrlimit(resource.RLIMIT_DATA, (self._setup.memory, self._setup.memory))
            run_job(files, lambda: self._agent or load_prepared(self._setup))
        finally:
            os._exit(1)

    def _end(self, id: int) -> None:
        for pid in [pid for pid, each in self._ids.items() if each == id and pid not in self._kill_at]:
            _signal_tree(pid, signal.SIGTERM)
            self._kill_at[pid] = time.monotonic() + _TERM_GRACE

    def _kill_overdue(self) -> None:
        for pid in [pid for pid, at in self._kill_at.items() if at <= time.monotonic()]:
            _signal_tree(pid, signal.SIGKILL)
            del self._kill_at[pid]

    def _reap(self) -> None:
        """Report which processes have exited, and end what they left behind."""
        exited: list[list[int]] = []
        any_ended = False
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                pid, any_ended = ended.si_pid, True
                if pid in self._ids:  # Until it is waited for, its process group cannot become another's.
                    _signal_tree(pid, signal.SIGKILL)
                    exited.append([self._ids.pop(pid), os.waitpid(pid, 0)[1]])
                    self._kill_at.pop(pid, None)
                else:
                    os.waitpid(pid, 0)
        if any_ended:
            self._end_orphans()
        for each in exited:
            _send(self._control, {"exited": each})

    def _end_orphans(self) -> None:
        """Kill what has become a child of this process because the root of its tree is gone."""
        for pid in _children_of_this():
            if pid not in self._ids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # The worker is gone; the next read shows it.
        control.sendall(json.dumps(message).encode() + b"\n")


def _fork() -> int:
    """`os.fork` without Python's warning of native threads (from 3.12 on): their libraries handle forks themselves."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        return os.fork()


def _adopt_orphans() -> None:
    """From now on this process is the parent of every descendant whose own parent ends (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _lead_tree() -> None:
    """Make this process the root of a tree of its own, which ends with the thread that forked it (Linux)."""
    os.setsid()
    _adopt_orphans()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_tree(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that leads a tree, and to its group; what has left the group follows when it ends."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _children_of_this() -> list[int]:
    """The processes whose parent this one is, by birth or adoption (Linux; elsewhere none are found)."""
    found = []
    if sys.platform == "linux":
        this = str(os.getpid()).encode()
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    # pid (command) state parent …; a command may contain anything.
                    if Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()[1] == this:
                        found.append(int(name))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
