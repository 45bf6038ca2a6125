"""Calling functions on text that nobody trusts; the text is Python, and tries what it can."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from agl_core.processes.sandbox import SandboxError, SandboxLimitError, run_sandboxed

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits files, sockets and processes")
LIBC = "__import__('ctypes').CDLL(None)"
DESCRIPTORS = "[n for n in range(64) if __import__('ctypes').CDLL(None).fcntl(n, 1) >= 0]"
"""Text whose value is the list of those that are open."""
SEEN: list[str] = []
REFUSED = "not permitted|denied|Invalid cross-device|start new thread|division by zero|File too large|allocate memory"


def evaluated(text: str) -> Any:
    """Evaluate text as a careless verifier does."""
    return eval(text)


def remembered(word: str) -> None:
    SEEN.append(word)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1 + 1", 2), ("{'a': [None, 'ü']}", {"a": [None, "ü"]}), ("__import__('sympy').Integer(3) > 2", None)],
)
async def test_a_json_value_comes_back(text: str, value: Any) -> None:
    if value is None:
        with pytest.raises(SandboxError, match="no JSON value"):
            await run_sandboxed(evaluated, text)
    else:
        assert await run_sandboxed(evaluated, text) == value


async def test_an_evaluation_leaves_nothing_for_the_next_but_what_is_prepared_is_there_each_time() -> None:
    module = f"__import__('sys').modules['{__name__}']"
    for _ in range(2):
        assert await run_sandboxed(evaluated, f"setattr({module}, 'evaluated', lambda text: 1.0)") is None
        assert "once" in await run_sandboxed(evaluated, f"{module}.SEEN", prepare=(remembered, "once"))


async def test_no_key_is_in_its_environment() -> None:
    given = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "PYTHONPATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
    assert set(await run_sandboxed(evaluated, "[*__import__('os').environ]")) <= given


@ON_LINUX
@pytest.mark.parametrize(
    "text",
    [
        "open({file!r}).read()",
        "open({file!r}, 'w')",
        "__import__('os').listdir({folder!r})",
        "__import__('os').chmod({file!r}, 0)",
        "__import__('os').truncate({file!r}, 0)",
        "__import__('os').link({file!r}, 'mine')",
        "open('/proc/self/environ').read()",
        "__import__('socket').create_connection(('127.0.0.1', {port}), 5)",
        "__import__('subprocess').run(['true'])",
        "__import__('os').fork()",
        "__import__('threading').Thread().start()",
        "__import__('os').kill({pid}, 0)",
        "__import__('fcntl').fcntl(1, 8, {pid})",  # F_SETOWN: whom the descriptor signals,
        "__import__('fcntl').fcntl(1, 10, 9)",  # F_SETSIG: and with SIGKILL.
        "__import__('fcntl').ioctl(1, 0x8901, bytes(4))",
        "__import__('os').sched_setscheduler({pid}, 5, __import__('os').sched_param(0))",
        "__import__('socket').socketpair()",
        f"1 / sum({LIBC}.shutdown(n, 2) + 1 for n in {DESCRIPTORS})",
        f"1 / ({LIBC}.msgget(0, 0) + 1)",
        "__import__('os').write(__import__('os').memfd_create('x'), b'x')",
        "__import__('mmap').mmap(-1, 2 << 30)",
        "open('/tmp/here', 'w')",
        "__import__('resource').prlimit({pid}, 0, (1, 1))",
        "__import__('os').read(__import__('os').open({file!r}, 0), 1)",
    ],
)
async def test_what_is_not_allowed_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("the answer")
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = text.format(file=str(file), folder=str(tmp_path), port=server.getsockname()[1], pid=os.getpid())
        with pytest.raises(SandboxError, match=REFUSED):
            await run_sandboxed(evaluated, text)
    assert (file.read_text(), os.access(file, os.R_OK)) == ("the answer", True)


async def test_files_that_it_needs_are_read(tmp_path: Path) -> None:
    file = tmp_path / "words"
    file.write_text("one")
    assert await run_sandboxed(evaluated, f"open({str(file)!r}).read()", reads=[file]) == "one"


@ON_LINUX
async def test_what_a_parent_has_open_is_closed(tmp_path: Path) -> None:
    with (tmp_path / "store").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        assert (
            len(await run_sandboxed(evaluated, DESCRIPTORS)) == 4
        )  # Standard streams, which lead nowhere; its result.


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("9**9**9**9", "longer than 0.1 seconds"),
        ("[None for _ in iter(int, 1)]", "longer than 0.1 seconds|out of memory"),
        ("__import__('time').sleep(1000)", "longer than 0.1 seconds"),
        (f"__import__('re').match('(a|a)*b', {'a' * 40!r})", "longer than 0.1 seconds"),
        ("__import__('signal').pthread_sigmask(0, range(1, 64)) or 9**9**9**9", "longer than 0.1 seconds"),
        pytest.param("bytearray(1 << 40)", "out of memory", marks=ON_LINUX),
        ("'x' * (2 << 20)", "returned more than"),
        ("__import__('os')._exit(0)", "its process ended"),
        ("exit()", "its process ended"),
        (f"[__import__('os').write({DESCRIPTORS}[-1], b'-x'), exit()]", "its process ended"),
        ("__import__('ctypes').string_at(0)", "its process ended .*SIGSEGV"),
        (f"[__import__('os').write(n, b'[') for n in {DESCRIPTORS}]", "wrote what is no value"),
    ],
)
async def test_what_exceeds_a_limit_is_ended(text: str, why: str) -> None:
    with pytest.raises(SandboxLimitError, match=why):
        await run_sandboxed(evaluated, text, seconds=0.1 if "longer" in why else 10.0)


async def test_an_exception_is_told_and_so_is_a_function_that_is_not_there() -> None:
    with pytest.raises(SandboxError, match="ZeroDivisionError: division by zero"):
        await run_sandboxed(evaluated, "1 / 0")
    with pytest.raises(SandboxError, match="cannot be imported: AttributeError"):
        await run_sandboxed(lambda: 1)


async def test_many_at_a_time_each_get_their_own_value() -> None:
    texts = [f"{number} * 2" for number in range(20)]
    assert await asyncio.gather(*(run_sandboxed(evaluated, text) for text in texts)) == list(range(0, 40, 2))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_its_process_may_be_killed_or_stopped_by_others(number: signal.Signals) -> None:
    assert asyncio.run(run_sandboxed(evaluated, "1")) == 1
    for process in psutil.Process().children():
        if any("processes.server" in argument for argument in process.cmdline()):
            process.send_signal(number)
            if number == signal.SIGKILL:
                process.wait(30)
    assert asyncio.run(run_sandboxed(evaluated, "2")) == 2
