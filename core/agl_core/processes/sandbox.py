"""Calling a function on text that nobody trusts, in a process without keys, files of the run or network.

A verifier that hands a model's answer to `eval`, to SymPy or to a regular expression runs what the model wrote. Here
it can waste its own seconds and memory, and spoil its own value; nothing else.

    trainer ──▶ fork server (has imported the function, holds no key) ──fork──▶ evaluator (limited) ──value──▶ trainer

Each evaluation is a process of its own. The fork server never sees the text, and the evaluator gives up what it does
not need (`_enter_sandbox`) before it sees it: the kernel holds it to that.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import dataclasses
import inspect
import json
import math
import os
import pickle
import platform
import resource
import site
import socket
import struct
import subprocess
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from agl_core.errors import AgentError, AglError
from agl_core.processes import ForkServer, NoProcessError, Process, fate, named, request
from agl_core.processes.server import imported, prctl
from agl_core.protocols import RewardValue
from agl_core.types import Episode, Reward, TransitionKey

SANDBOX_SECONDS = 10.0
"""The time limit of an evaluation that sets none."""
_MAX_REPLY = 1 << 20
_AT_ONCE = 4
"""Evaluations that an event loop has running; others wait, and their time does not count yet."""
_MEMORY = 1 << 30
"""Bytes that an evaluation may ask for, beside what its process has."""
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_TURNS = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()


class SandboxError(AglError, RuntimeError):
    """The function raised in the sandbox, or could not be imported there."""


class SandboxLimitError(SandboxError):
    """It took too long, needed too much memory, or its process ended: the text that it was given is to blame."""


async def run_sandboxed(
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float = SANDBOX_SECONDS,
    reads: Iterable[Path] = (),
    prepare: Sequence[Any] | None = None,
    max_reply: int = _MAX_REPLY,
) -> Any:
    """Call `function(*arguments)` in a fork of a process that has imported it; returns its JSON value.

    The function is one of a module, and so are functions among its arguments, which can be pickled. It may take
    `seconds`, read the files `reads`, and return `max_reply` bytes of JSON. `prepare`, a function of a module and its
    JSON arguments, is called once before, outside the sandbox, to fill caches; it must not see the text. SandboxError
    if the function raises, SandboxLimitError if it exceeds a limit.
    """
    functions = [argument for argument in arguments if inspect.isfunction(argument)]
    asked, server = request(_evaluate, function, *functions, prepare=prepare), _fork_server(os.getpid())
    async with _TURNS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_AT_ONCE)):
        job = {
            "function": named(function),
            "arguments": base64.b64encode(pickle.dumps(arguments)).decode(),
            "seconds": seconds,
            "reads": [str(path.absolute()) for path in reads],
        }
        try:
            async with server.started(asked=asked, max_message=max_reply) as process:
                process.send(job)
                reply = await _reply(process, seconds)
                status = None if reply else await process.exited
        except (NoProcessError, AgentError) as error:
            raise SandboxError(str(error)) from error
        except ValueError:
            raise SandboxLimitError(f"it returned more than {max_reply} bytes") from None
    if status is not None:
        raise SandboxLimitError(f"its process ended before it had a value ({fate(status)})")
    return _value(reply)


async def _reply(process: Process, seconds: float) -> bytes:
    """The line that an evaluation writes when it ends; nothing if there is none."""
    lines = process.lines()
    await anext(lines, None)  # It has begun; waiting for that does not count.
    try:
        async with asyncio.timeout(seconds):
            reply = await anext(lines, b"")
    except TimeoutError:
        raise SandboxLimitError(f"it took longer than {seconds:g} seconds") from None
    return reply if reply.endswith(b"\n") else b""


@cache
def _fork_server(owner: int) -> ForkServer:
    """The fork server of this process: a fork of it has to start its own."""
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # Threads do not survive a fork.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return ForkServer(environment, request(_evaluate), grace=0.0, cwd="/", stdout=subprocess.DEVNULL)


def _evaluate(job: dict[str, Any], channel: socket.socket) -> None:
    """In the evaluator: write a line at once, then `["value", VALUE]` or `["error", TEXT]`; neither after `exit()`."""
    result = channel.fileno()
    try:
        os.write(result, b"\n")
        _enter_sandbox(result, job["seconds"], job["reads"])
        function, arguments = imported(*job["function"]), pickle.loads(base64.b64decode(job["arguments"]))
        reply: list[Any] = ["value", function(*arguments)]
    except Exception as error:
        reply = ["error", "".join(traceback.format_exception_only(error)).strip()]
    try:
        data = json.dumps(reply).encode()
    except (TypeError, ValueError) as error:
        data = json.dumps(["error", f"it returned what is no JSON value: {error}"]).encode()
    data += b"\n"
    while data:
        data = data[os.write(result, data) :]


def _value(reply: bytes) -> Any:
    """The value in what an evaluation wrote, which may be anything."""
    try:
        kind, value = json.loads(reply)
    except (ValueError, TypeError, RecursionError):
        raise SandboxLimitError("its process wrote what is no value") from None
    if kind != "value":
        raise SandboxLimitError("it ran out of memory") if value == "MemoryError" else SandboxError(str(value))
    return value


class IsolatedRule(ABC):
    """A rule that runs in a sandbox, since it hands the model's text to code that evaluates it."""

    @abstractmethod
    async def __call__(self, episode: Episode, time_limit: float = SANDBOX_SECONDS) -> RewardValue:
        """Reward an episode. `time_limit` is that of the evaluation; waiting for its turn does not count."""


class IsolatedFunction(IsolatedRule):
    def __init__(self, function: Callable[..., RewardValue], settings: Mapping[str, Any]) -> None:
        self._function, self._settings = function, dict(settings)

    async def __call__(self, episode: Episode, time_limit: float = SANDBOX_SECONDS) -> RewardValue:
        value = await run_sandboxed(_in_json, self._function, episode, self._settings, seconds=time_limit)
        return value if value is None or isinstance(value, float) else _from_json(value)


def _in_json(function: Callable[..., RewardValue], episode: Episode, settings: Mapping[str, Any]) -> Any:
    """Reward an episode; returns a number, a list of names or transition keys with their values, or one of rewards."""
    value = function(episode, **settings)
    if value is None or isinstance(value, int | float):
        return None if value is None else float(value)
    if isinstance(value, Mapping):
        return [[part, float(number)] for part, number in value.items()]
    return [dataclasses.asdict(reward) for reward in value]


def _from_json(value: Any) -> RewardValue:
    if value and isinstance(value[0], dict):
        return [Reward(**reward) for reward in value]
    return {part if isinstance(part, str) else TransitionKey(*part): float(number) for part, number in value}


def _enter_sandbox(result: int, seconds: float, reads: Iterable[str]) -> None:
    """Give up descriptors other than `result`, writing to files, and memory and CPU time without bound.

    On Linux also files other than `reads` and the interpreter's (by Landlock), and what `_DENIED` lists (by seccomp).
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


# The rest speaks to Linux. Its structures and numbers are those of capabilities(7), landlock(7) and seccomp(2).

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_READ = 0b1101
"""Execute (load a library), read a file, list a folder."""
_FILE_RIGHTS = 0b101
"""Rights of `_READ` that a rule for a single file may have."""


def _drop_capabilities() -> None:
    """Drop root's rights, in a container for instance; no others can be had, since it can start no program."""
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    ctypes.CDLL(None).capset(header, none)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _restrict_files(reads: Iterable[str]) -> None:
    """Refuse every file but those that are read; a kernel without Landlock (before 5.13) refuses none."""
    call = ctypes.CDLL(None, use_errno=True).syscall
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
"""System calls refused with `EPERM`: their numbers on x86_64 and aarch64.

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
