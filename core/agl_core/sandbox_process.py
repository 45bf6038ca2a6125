"""The program of the process that evaluates a function on text that nobody trusts, for `agl_core.sandbox`.

    trainer ──socket──▶ template (has imported the function) ──fork──▶ evaluator (sandboxed) ──▶ trainer

The template imports what is asked for once, and never sees a model's text: each evaluation is a fork of it, so nothing
that one evaluation changes is there for the next. The evaluator alone reads the arguments from the trainer's socket,
calls the function, and answers there. Its time is up when the trainer closes the socket: then the template kills it.

The template starts with an environment of its own and uses only the standard library, so it holds no key of the run.
What the evaluator may do is limited by the kernel (`_enter_sandbox`), from whose limits no code in it can step back.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import math
import os
import pickle
import platform
import resource
import select
import signal
import site
import socket
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

AT_ONCE = 4
"""Evaluations that run at a time; others wait, and their time does not count yet."""
_MEMORY = 1 << 30
"""Bytes that an evaluation may ask for, beside what the template has."""
PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38


def main() -> None:
    """`python -I sandbox_process.py FD`: serve evaluations asked for over that socket, until its other end is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    running: dict[int, socket.socket] = {}
    ended, end = socket.socketpair()
    ended.setblocking(False)
    end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(end.fileno())
    while True:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(control, select.POLLIN if len(running) < AT_ONCE else 0)
        for client in running.values():
            poll.register(client, 0)  # Nothing more comes from it; but it may hang up.
        ready = {file for file, _ in poll.poll()}
        with contextlib.suppress(BlockingIOError):
            ended.recv(1 << 10)
        for pid, client in list(running.items()):
            if client.fileno() in ready:
                os.kill(pid, signal.SIGKILL)
            if _finish(pid, client, wait=client.fileno() in ready):
                del running[pid]
        if control.fileno() in ready:
            _, files, _, _ = socket.recv_fds(control, 1, 1)
            if not files:
                break
            client = socket.socket(fileno=files[0])
            with contextlib.suppress(ConnectionError, EOFError):  # The caller has gone.
                if evaluator := _begin(client):
                    running[evaluator] = client
                    continue
            client.close()
    for pid, client in running.items():
        os.kill(pid, signal.SIGKILL)
        _finish(pid, client, wait=True)


def _begin(client: socket.socket) -> int | None:
    """Start an evaluation; None if what it needs cannot be imported."""
    request = json.loads(_received(client))
    sys.path[:] = request["path"]
    try:
        function, *_ = [_function(*name) for name in request["functions"]]
        if request["prepare"] is not None:
            prepare, *arguments = request["prepare"]
            _function(*prepare)(*arguments)
    except Exception as error:
        failure = "".join(traceback.format_exception_only(error)).strip()
        client.sendall(b"\n" + json.dumps(["error", f"it cannot be imported: {failure}"]).encode() + b"\n")
        return None
    if pid := fork():
        return pid
    try:
        _evaluate(function, client, request)
    finally:
        os._exit(0)


def fork() -> int:
    """`os.fork` without Python's warning of native threads (from 3.12 on): their libraries handle forks themselves."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        return os.fork()


def _finish(pid: int, client: socket.socket, *, wait: bool) -> bool:
    """True if an evaluation has ended; its exit status goes to the caller."""
    ended, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
    if ended:
        with contextlib.suppress(OSError):
            client.send(str(os.waitstatus_to_exitcode(status)).encode(), socket.MSG_DONTWAIT)
        client.close()
    return bool(ended)


def _received(client: socket.socket) -> bytes:
    """One message: its length in eight bytes, and its bytes."""
    return _exactly(client, int.from_bytes(_exactly(client, 8), "big"))


def _exactly(client: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = client.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _function(module_name: str, file: str | None, name: str) -> Callable[..., Any]:
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


def _evaluate(function: Callable[..., Any], client: socket.socket, request: dict[str, Any]) -> None:
    """In the evaluator: write a line when it begins, and `["value", VALUE]` or `["error", TEXT]` as JSON.

    What is no error but ends a process (`exit()`) ends it without either.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    reply: list[Any]
    result = client.fileno()
    try:
        arguments = _received(client)
        os.write(result, b"\n")
        _enter_sandbox(result, request["seconds"], request["reads"])
        reply = ["value", function(*pickle.loads(arguments))]
    except Exception as error:
        reply = ["error", "".join(traceback.format_exception_only(error)).strip()]
    try:
        data = json.dumps(reply).encode()
    except (TypeError, ValueError) as error:
        data = json.dumps(["error", f"it returned what is no JSON value: {error}"]).encode()
    data += b"\n"
    while data:
        data = data[os.write(result, data) :]


def _enter_sandbox(result: int, seconds: float, reads: Iterable[str]) -> None:
    """Give up what an evaluation does not need.

    Everywhere: other descriptors than `result`, writing to files, and memory and CPU time without bound. On Linux also:
    files (by Landlock) but those of the interpreter and `reads`; and (by seccomp) what `_DENIED` lists.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    os.closerange(3, result)
    os.closerange(result + 1, os.sysconf("SC_OPEN_MAX"))
    for limit, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, math.ceil(seconds) + 1),
        (resource.RLIMIT_AS, _memory_in_use() + _MEMORY),  # Unlike RLIMIT_DATA, it counts shared memory.
        (resource.RLIMIT_FSIZE, 0),
    ):
        with contextlib.suppress(ValueError):  # There is a lower one already.
            resource.setrlimit(limit, (most, most))
    if sys.platform == "linux":
        _drop_capabilities()
        _restrict_files(reads)
        _restrict_system_calls()


def _memory_in_use() -> int:
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return 0


# What follows speaks to Linux. Its structures and numbers are those of capabilities(7), landlock(7) and seccomp(2).

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_READ = 0b1101
"""Execute (load a library), read a file, list a folder."""
_FILE_RIGHTS = 0b101
"""Those of `_READ` that a rule for a single file may have."""


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int, address: int = 0) -> None:
    """Change how the kernel treats this process; elsewhere than on Linux nothing. OSError if it refuses."""
    numbers = map(ctypes.c_ulong, (value, address, 0, 0))
    if sys.platform == "linux" and _library().prctl(option, *numbers) != 0:
        raise OSError(ctypes.get_errno(), f"this kernel refuses prctl {option}")


def _drop_capabilities() -> None:
    """Those of root, in a container for instance; it cannot get others, since it can start no program."""
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _library().capset(header, none)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _restrict_files(reads: Iterable[str]) -> None:
    """Refuse every file but those that are read; a kernel without Landlock (before 5.13) refuses none."""
    call = _library().syscall
    version = call(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    rights = {1: (1 << 13) - 1, 2: (1 << 14) - 1}.get(version, (1 << 15) - 1)
    attributes = struct.pack("Q", rights)
    rules = call(_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    # Not whole prefixes: /usr/src/app is where images put an application, with its tasks and runs.
    prefixes = (sys.prefix, sys.base_prefix, "/", "/usr", "/usr/local")
    libraries = [os.path.join(prefix, name) for prefix in prefixes for name in ("lib", "lib64", "share")]
    packages = [*site.getsitepackages(), site.getusersitepackages()]
    system = [os.devnull, "/dev/urandom", "/etc/ld.so.cache", "/etc/localtime"]
    for path in (*libraries, *packages, *system, *reads):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", _READ if os.path.isdir(path) else _FILE_RIGHTS, file)
            call(_LANDLOCK_ADD_RULE, rules, 1, rule, 0)
            os.close(file)
    if call(_LANDLOCK_RESTRICT_SELF, rules, 0) != 0:
        raise OSError(ctypes.get_errno(), "this kernel refuses Landlock")
    os.close(rules)


_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_OWNING = {
    "x86_64": ((72, (8, 10, 15)), (16, (0x8901, 0x8902))),
    "aarch64": ((25, (8, 10, 15)), (29, (0x8901, 0x8902))),
}
"""Commands of fcntl (F_SETOWN, F_SETSIG, F_SETOWN_EX) and ioctl (FIOSETOWN, SIOCSPGRP) that choose whom a descriptor
signals, and with which signal: SIGKILL for another process of the user, if it likes."""
_DENIED = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "shutdown": (48, 210),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "unshare": (272, 97),
    "setns": (308, 268),
    "io_uring_setup": (425, 425),
    "open_by_handle_at": (304, 265),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
"""System calls that an evaluation gets `EPERM` for, with their numbers on x86_64 and aarch64.

They open sockets (and `shutdown` the caller's), start processes and threads, signal, inspect or slow down other ones,
change files that may not be opened, or leave something behind in the kernel.
"""


def _restrict_system_calls() -> None:
    """Refuse `_DENIED`, `_OWNING`, and `prlimit` of other processes, by a BPF program; see seccomp(2)."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return
    load, equal, greater, done = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000
    number, architecture, first_argument, second_argument = 0, 4, 16, 24
    numbers = [call for pair in _DENIED.values() if (call := pair[machine == "aarch64"]) is not None]
    program = [
        (load, 0, 0, architecture),
        (equal, 1, 0, _ARCHITECTURES[machine]),
        (done, 0, 0, kill),
        (load, 0, 0, number),
        (greater, 0, 1, 0x40000000),  # The numbers of x32, another way to the same calls.
        (done, 0, 0, kill),
        *(instruction for call in numbers for instruction in ((equal, 0, 1, call), (done, 0, 0, refuse))),
        (equal, 0, 4, _PRLIMIT[machine]),
        (load, 0, 0, first_argument),
        (equal, 0, 1, 0),
        (done, 0, 0, allow),
        (done, 0, 0, refuse),
    ]
    for call, commands in _OWNING[machine]:
        program += [(equal, 0, 2 * len(commands) + 2, call), (load, 0, 0, second_argument)]
        program += [step for command in commands for step in ((equal, 0, 1, command), (done, 0, 0, refuse))]
        program += [(done, 0, 0, allow)]
    program += [(done, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    filters = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(filters))


if __name__ == "__main__":
    main()
