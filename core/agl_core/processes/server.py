"""The program that starts processes by forking itself, and ends each with everything that it started.

    parent ──socket──▶ fork server (single-threaded, has imported the functions) ──fork──▶ one process per job

It is a program of its own, since a fork of its parent, which has threads, may hang. Messages are lines of JSON. The
parent gets `{"threads": number}` once the server is ready, or `{"failed": reason}`. A byte that it sends alone is a
ping, which is answered; one with file descriptors, a leash and those that the process gets, asks for a process. The
leash has a line that says which functions are imported before the fork, and ends the process when the parent shuts its
side down. Over it comes `{"exited": status}`, as from waitpid, once nothing of the process is left, or
`{"failed": reason}` if there could be none. When the parent is gone, everything that was started for it is ended.

On Linux nothing escapes: each process adopts its orphaned descendants, also those in sessions of their own, and the
server adopts what such a process leaves behind. Elsewhere the process group is ended.

A process gets its job as one line over its channel, the first of its file descriptors, and calls the first function
with the job, the channel and the other descriptors. The server never sees a job: each process begins as the first did.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from agl_core.errors import AglError

_MAX_FILES = 4
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
"""A subreaper becomes the parent of every descendant whose own parent ends."""


def main() -> None:
    """`python -m agl_core.processes.server SETUP FD`: serve the parent at that socket's other end, until it is gone."""
    setup, control = json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    try:
        _imported(setup["request"])
    except Exception as error:
        _send(control, {"failed": _described(error)})
        return
    gc.freeze()  # No fork should collect what is imported here: its pages stay shared.
    _send(control, {"threads": threading.active_count() - 1})
    _ForkServer(control, **setup["processes"]).serve()


def imported(module_name: str, file: str | None, name: str) -> Callable[..., Any]:
    """The function of a module, which is imported once; one that is no part of a package, from its file."""
    if module_name not in sys.modules and file is not None and "." not in module_name:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    function: Any = importlib.import_module(module_name)
    for part in name.split("."):
        function = getattr(function, part)
    return function  # type: ignore[no-any-return]


def _imported(request: dict[str, Any]) -> Callable[..., None]:
    """The function that the process calls; all functions are imported, and what they need is prepared."""
    if request["path"] is not None:
        sys.path[:] = request["path"]
    function, *_ = [imported(*name) for name in request["functions"]]
    if request["prepare"] is not None:
        prepare, *arguments = request["prepare"]
        imported(*prepare)(*arguments)
    return function


class _ForkServer:
    def __init__(self, control: socket.socket, *, memory: int | None, grace: float, adopt: bool) -> None:
        """See `ForkServer` of the parent."""
        self._control, self._memory, self._grace, self._adopt = control, memory, grace, adopt
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
                    self._kill_at[held[file]] = time.monotonic() + self._grace
                else:
                    connected = self._receive()
            for pid in [pid for pid, at in self._kill_at.items() if at <= time.monotonic()]:
                _signal_tree(pid, signal.SIGKILL)
                self._kill_at[pid] = math.inf
            self._reap()
        for pid in self._leashes:
            _signal_tree(pid, signal.SIGKILL)
        self._leashes.clear()
        with contextlib.suppress(ChildProcessError):
            while True:  # Their own children then become children of this process.
                self._end_orphans()
                os.waitpid(-1, 0)

    def _receive(self) -> bool:
        """Start a process, or answer a ping; False if the parent is gone."""
        try:
            message, files, _, _ = socket.recv_fds(self._control, 1, _MAX_FILES)
            if message and not files:
                self._control.sendall(message)
        except ConnectionError:
            return False
        if not files:
            return bool(message)
        for file in files:
            os.set_inheritable(file, False)
        leash, own = socket.socket(fileno=files[0]), files[1:]
        try:
            function = _imported(_received(leash))
            pid = _fork()
        except Exception as error:
            _send(leash, {"failed": _described(error)})
            leash.close()
        else:
            self._leashes[pid] = leash
            if pid == 0:
                self._become(function, *own)
        for file in own:
            os.close(file)
        return True

    def _become(self, function: Callable[..., None], file: int, *files: int) -> NoReturn:
        """Lead a tree of processes, which ends with the server, and do the job that comes over the channel."""
        try:
            os.setsid()
            with contextlib.suppress(OSError):
                prctl(_PR_SET_CHILD_SUBREAPER, int(self._adopt))
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for connection in (self._control, *self._leashes.values()):
                connection.close()
            if self._memory is not None:
                resource.setrlimit(resource.RLIMIT_DATA, (self._memory, self._memory))
            channel = socket.socket(fileno=file)
            function(_received(channel), channel, *files)
            os._exit(0)
        finally:
            os._exit(1)

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
        if exited or (any_ended and self._adopt):
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


def prctl(option: int, value: int, address: int = 0) -> None:
    """Change how the kernel treats this process; elsewhere than on Linux nothing. OSError if it refuses."""
    numbers = map(ctypes.c_ulong, (value, address, 0, 0))
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, *numbers) != 0:
        raise OSError(ctypes.get_errno(), f"this kernel refuses prctl {option}")


def _fork() -> int:
    """`os.fork` without Python's warning of native threads (from 3.12 on): their libraries handle forks themselves."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        try:
            return os.fork()
        except OSError as error:
            raise AglError(f"no process could be started ({error})") from error


def _received(connection: socket.socket) -> Any:
    with connection.makefile("rb") as lines:
        return json.loads(lines.readline())


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # The parent is gone; the next read shows it.
        connection.sendall(json.dumps(message).encode() + b"\n")


def _described(error: Exception) -> str:
    if isinstance(error, AglError):
        return str(error)
    return f"it cannot be imported: {''.join(traceback.format_exception_only(error)).strip()}"


def _signal_tree(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that leads a tree, and to its group; what has left the group follows when it ends."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _children() -> list[int]:
    """The processes whose parent this one is, by birth or adoption (Linux; elsewhere none are adopted)."""
    with contextlib.suppress(OSError):  # It may miss one while another exits; that is then reaped, and this read again.
        return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]
    return []


if __name__ == "__main__":
    main()
