"""Runs a command in the foreground, as a shell would, and passes signals on to it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Exit:
    """How a command ended."""

    code: int
    """As in a shell: the exit status, or 128 and the number of the signal that ended it."""
    interrupted: bool
    """Whether a signal was passed on to it."""


async def launch(command: Sequence[str], environment: Mapping[str, str]) -> Exit:
    """Run a command with this process's input and output, until it ends. OSError if it cannot be started."""
    process: asyncio.subprocess.Process | None = None
    came: list[signal.Signals] = []

    def pass_on(number: signal.Signals) -> None:
        if process is not None and (number is not signal.SIGINT or not _has_terminal()):
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def handle(number: signal.Signals) -> None:
        came.append(number)
        pass_on(number)

    with _handled(handle):  # Before the command starts: a signal may come as soon as it does.
        process = await asyncio.create_subprocess_exec(*command, env=environment)
        for number in tuple(came):
            pass_on(number)
        status = await process.wait()
    return Exit(status if status >= 0 else 128 - status, bool(came))


def _has_terminal() -> bool:
    """Whether this process is in the foreground of a terminal, which sends its Ctrl-C to the command too."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


@contextmanager
def _handled(handle: object) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in _PASSED_ON:
        loop.add_signal_handler(number, handle, number)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number in _PASSED_ON:
            loop.remove_signal_handler(number)
