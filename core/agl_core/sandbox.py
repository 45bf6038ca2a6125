"""Calling a function on text that nobody trusts, in a process without keys, files of the run or network.

A verifier that hands a model's answer to `eval`, to SymPy or to a regular expression runs what the model wrote. Here
it can waste its own seconds and memory, and spoil its own value; nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agl_core.errors import AglError
from agl_core.protocols import RewardValue
from agl_core.types import Episode, Reward, TransitionKey

_PROGRAM = Path(__file__).with_name("sandbox_process.py")
SANDBOX_SECONDS = 10.0
"""The time limit of an evaluation that sets none."""
_MAX_REPLY = 1 << 20
_STARTING = threading.Lock()
"""Two threads that need the template process at once start one."""


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
    `seconds`, read the files `reads`, and return `max_reply` bytes of JSON. `prepare` is a function of a module and its
    JSON arguments: it is called once before, outside the sandbox, so it must not see the text; what it caches is there
    in each evaluation. SandboxError if the function raises, SandboxLimitError if it exceeds a limit.
    """
    request = {
        "functions": [_named(callee) for callee in (function, *arguments) if inspect.isfunction(callee)],
        "path": [folder for folder in sys.path if folder],
        "seconds": seconds,
        "reads": [str(path.absolute()) for path in reads],
        "prepare": prepare and [_named(prepare[0]), *prepare[1:]],
    }
    messages = [json.dumps(request).encode(), pickle.dumps(arguments)]
    data = b"".join(len(message).to_bytes(8, "big") + message for message in messages)
    loop, reply = asyncio.get_running_loop(), bytearray()
    ours, template = await asyncio.to_thread(_connected)
    keeping = asyncio.create_task(_keep_running(template))
    with ours, contextlib.ExitStack() as stack:  # Once it is closed, the evaluation is ended.
        stack.callback(keeping.cancel)
        ours.setblocking(False)
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(ours, data)
            await loop.sock_recv(ours, 1)  # It has begun; waiting for its turn does not count.
            try:
                async with asyncio.timeout(seconds):
                    while len(reply) <= max_reply and (chunk := await loop.sock_recv(ours, 1 << 16)):
                        reply += chunk
            except TimeoutError:
                raise SandboxLimitError(f"it took longer than {seconds:g} seconds") from None
    if len(reply) > max_reply:
        raise SandboxLimitError(f"it returned more than {max_reply} bytes")
    line, newline, status = bytes(reply).rpartition(b"\n")
    if newline:
        return _value(line)
    if not status:
        raise SandboxError("the process that should have called it was killed from outside")
    with contextlib.suppress(ValueError):  # What it wrote itself may stand before its status.
        status = signal.Signals(-int(status)).name.encode()
    raise SandboxLimitError(f"its process ended before it had a value ({status.decode(errors='replace'):.100})")


class IsolatedRule(ABC):
    """A rule that runs in a sandbox, since it hands the model's text to code that evaluates it."""

    @abstractmethod
    async def __call__(self, episode: Episode, time_limit: float = SANDBOX_SECONDS) -> RewardValue:
        """Reward an episode. `time_limit` is that of the evaluation; waiting for its turn does not count."""


class IsolatedFunction(IsolatedRule):
    """A function of the user's in a sandbox."""

    def __init__(self, function: Callable[..., RewardValue], settings: Mapping[str, Any]) -> None:
        self._function, self._settings = function, dict(settings)

    async def __call__(self, episode: Episode, time_limit: float = SANDBOX_SECONDS) -> RewardValue:
        value = await run_sandboxed(_in_json, self._function, episode, self._settings, seconds=time_limit)
        return value if value is None or isinstance(value, float) else _from_json(value)


def _in_json(function: Callable[..., RewardValue], episode: Episode, settings: Mapping[str, Any]) -> Any:
    """Reward an episode; returns a number, or a list of names, transition keys and rewards with their values."""
    value = function(episode, **settings)
    if value is None or isinstance(value, int | float):
        return None if value is None else float(value)
    if isinstance(value, Mapping):
        return [["part", part, float(number)] for part, number in value.items()]
    return [["reward", dataclasses.asdict(reward)] for reward in value]


def _from_json(value: Any) -> RewardValue:
    parts: dict[str | TransitionKey, float] = {}
    rewards: list[Reward] = []
    for kind, *what in value:
        if kind == "part":
            parts[what[0] if isinstance(what[0], str) else TransitionKey(*what[0])] = float(what[1])
        else:
            rewards.append(Reward(**what[0]))
    return rewards or parts


def _value(reply: bytes) -> Any:
    """The value in what an evaluation wrote, which may be anything."""
    try:
        kind, value = json.loads(reply)
    except (ValueError, TypeError, RecursionError):
        raise SandboxLimitError("its process wrote what is no value") from None
    if kind != "value":
        raise SandboxLimitError("it ran out of memory") if value == "MemoryError" else SandboxError(str(value))
    return value


def _named(function: Callable[..., Any]) -> tuple[str, str | None, str]:
    """Module, file and name, by which another process finds the function."""
    return function.__module__, getattr(sys.modules[function.__module__], "__file__", None), function.__qualname__


async def _keep_running(template: subprocess.Popen[bytes]) -> None:
    """Let it go on whenever an agent's tool stopped it."""
    while True:
        template.send_signal(signal.SIGCONT)
        await asyncio.sleep(1)


def _connected() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A connection to the template process, which is started if there is none."""
    ours, theirs = socket.socketpair()
    with theirs, _STARTING:
        for _ in range(2):
            control, process = _template(os.getpid())
            try:
                socket.send_fds(control, [b"\n"], [theirs.fileno()])
                break
            except ConnectionError:  # It was killed.
                process.wait()
                _template.cache_clear()
    return ours, process


@cache
def _template(owner: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A running `sandbox_process.py` and the way to it, of this process: a fork of it has to start its own.

    It ends when the way to it is closed, as it is with this process.
    """
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    kept |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # Threads do not survive a fork.
    return launch("-I", str(_PROGRAM), env=kept, cwd="/", stdout=subprocess.DEVNULL)


def launch(*arguments: str, **options: Any) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Run Python with these arguments and the number of a socket, whose other end is returned too."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *arguments, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is meant for the run.
            **options,
        )
    return ours, process
