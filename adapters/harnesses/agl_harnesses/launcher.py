"""The program that runs a command with limits: `python -I -S launcher.py SETTINGS COMMAND…`; it needs Python alone.

It passes signals and the command's exit status on. When the command has exited, everything that it started has ended
too. In a sandbox without a network it listens at the gateway's port and passes connections on to a Unix socket, at
whose other end the worker passes them on to the gateway (`agl_harnesses.sandbox`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

CHECK_EVERY = 0.25
"""Seconds between two looks at the number of processes and the space that they take."""
GRACE = 2.0
"""Seconds for the command to end after a signal that asks it to."""
OVER_LIMIT = 137
"""The exit status if the command was killed."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> NoReturn:
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    listener = socket.create_server(("127.0.0.1", settings["port"])) if settings["port"] else None
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getpid() != 1:  # In the sandbox, bubblewrap has set a signal that needs no handler.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    child = os.fork()
    if child == 0:
        _become(command, settings)
    stopped = list[float]()

    def stop(number: int, _: object) -> None:
        _signal_group(child, number)
        stopped.append(time.monotonic())

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    is_limited = settings["processes"] or settings["disk"]
    waited_for: list[Any] = [woken] if listener is None else [woken, listener]
    code, orphans = None, 0
    while code is None:
        ready, _, _ = select.select(waited_for, [], [], CHECK_EVERY if is_limited or stopped else None)
        if woken in ready:
            os.read(woken, 4096)
        if listener is not None and listener in ready:
            threading.Thread(target=_serve, args=(listener.accept()[0], settings["socket"]), daemon=True).start()
        code, adopted = _reaped(child)
        orphans += adopted
        if code is None and stopped and time.monotonic() > stopped[0] + GRACE:
            code = OVER_LIMIT
        if code is None and is_limited and (reason := _excess(settings)):
            with contextlib.suppress(OSError):
                os.write(2, f"agl ends this: {reason}\n".encode())
            code = OVER_LIMIT
    if settings["alone"] and (orphans or _descendants()):
        with contextlib.suppress(OSError):
            os.write(2, b"agl refuses this: a process outlived the one that had started it\n")
        code = OVER_LIMIT
    _end_everything(child)
    os._exit(code)


def _become(command: list[str], settings: dict[str, Any]) -> NoReturn:
    try:
        os.setsid()
        os.chdir(settings["folders"][0])
        if settings["variables"]:
            with open(settings["variables"]) as variables:
                os.environ.update(json.load(variables))
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        limits = ((resource.RLIMIT_DATA, settings["memory"]), (resource.RLIMIT_FSIZE, settings["disk"]))
        for limit, most in (*limits, (resource.RLIMIT_CORE, 0)):
            if most is not None:
                resource.setrlimit(limit, (most, most))
        os.execvp(command[0], command)
    except (OSError, ValueError) as error:
        os.write(2, f"{command[0]} cannot be run: {error}\n".encode())
    finally:
        os._exit(127)


def _reaped(child: int) -> tuple[int | None, int]:
    """The child's exit code if it has exited, as a shell has it, and how many adopted processes have."""
    code, adopted = None, 0
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
            else:
                adopted += 1
    return (128 - code if code is not None and code < 0 else code), adopted


def _excess(settings: dict[str, Any]) -> str | None:
    """The limit that is exceeded, in words."""
    if settings["processes"] and (count := len(_descendants())) > settings["processes"]:
        return f"it has {count} processes, and {settings['processes']} are the limit (workspace.processes)"
    if settings["disk"] and (size := sum(map(_size, settings["folders"]))) > settings["disk"]:
        return f"its files take {size >> 20} MiB, and {settings['disk'] >> 20} are the limit (workspace.disk_mib)"
    return None


def _size(folder: str) -> int:
    total = 0
    for path, folders, names in os.walk(folder):
        for name in (*folders, *names):
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total


def _descendants() -> list[int]:
    """Every process that this one started, or they did (Linux; elsewhere none)."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat", "rb") as stat:
                children.setdefault(int(stat.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    found, waiting = list[int](), [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _end_everything(child: int) -> None:
    """Kill what the command left behind; orphans become children of this process, which then reaps them."""
    _signal_group(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in _descendants():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _signal_group(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, number)


def _serve(connection: socket.socket, path: str) -> None:
    """Pass one connection on to the Unix socket, both ways, until both sides have ended."""
    with connection, socket.socket(socket.AF_UNIX) as other, contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        other.connect(path)
        back = threading.Thread(target=_pump, args=(other, connection), daemon=True)
        back.start()
        _pump(connection, other)
        back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


if __name__ == "__main__":
    main()
