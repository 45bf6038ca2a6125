"""`agl view` as a user runs it, and the pages of a run while this process, or another one, writes it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from agl_core.errors import ServerError, StoreError
from agl_server.store.connections import is_written
from agl_server.store.sqlite import SqliteStore
from agl_view.serving import shown_beside

from .viewed_runs import Folder, rollout


@pytest.fixture
def view(runs: Folder) -> Iterator[subprocess.Popen[str]]:
    """`agl view` in the folder around ./runs."""
    process = subprocess.Popen(
        [Path(sys.executable).with_name("agl"), "view", "--no-browser"],
        cwd=runs.path.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    yield process
    process.kill()
    process.wait()


def printed_address(view: subprocess.Popen[str]) -> str:
    assert view.stdout is not None
    first = view.stdout.readline()
    match = re.fullmatch(r"view:  (http://127\.0\.0\.1:\d+/\?token=\S{30,})\n", first)
    assert match is not None, first
    return match[1]


def test_the_printed_address_opens_and_ctrl_c_ends_it(runs: Folder, view: subprocess.Popen[str]) -> None:
    runs.trained()
    address = printed_address(view)

    with httpx.Client(follow_redirects=True) as browser:
        assert browser.get(address.partition("?")[0]).status_code == 401
        assert "/runs/calc" in browser.get(address).text
    view.send_signal(signal.SIGINT)
    output, _ = view.communicate(timeout=60)

    assert view.returncode in (0, 130)
    assert "Traceback" not in output


def test_a_folder_without_runs_is_named(runs: Folder, tmp_path: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("agl"), "view", "nope", "--no-browser"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "nope is not a run's folder" in done.stderr


PATIENCE = 30.0


def opened(address: str) -> str:
    with httpx.Client(follow_redirects=True, timeout=PATIENCE) as browser:
        return browser.get(address).text


async def test_a_run_is_shown_while_this_process_writes_it_and_its_lock_stays(runs: Folder) -> None:
    folder = await asyncio.to_thread(runs.trained)
    before = psutil.Process().children()

    async with SqliteStore(folder / "store.sqlite") as store, shown_beside(folder, "127.0.0.1", 0, None) as address:
        with pytest.raises(ServerError, match="use port 0 for a free one"):
            async with shown_beside(folder, "127.0.0.1", httpx.URL(address).port or 0, None):
                pass
        assert psutil.Process().children() == before, "no process is started before someone looks"
        page = await asyncio.to_thread(opened, address)
        assert len(psutil.Process().children()) == len(before) + 1
        await store.put(*rollout("s2-g0-m0", answer="9", reward=1.0, advantage=0.1))
        later = await asyncio.to_thread(opened, address)
        refused = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SECOND_WRITER, folder / "store.sqlite", stderr=subprocess.PIPE
        )
        _, errors = await refused.communicate()

    assert "running" in page
    assert 'data-changed="/runs/calc/changed"' in page
    assert "data-changed" not in runs.page("/runs/calc"), "it has ended"
    assert "reward 2: 1 rollouts" in later
    assert StoreError.__name__.encode() in errors
    with pytest.raises(httpx.ConnectError):
        await asyncio.to_thread(opened, address)
    assert psutil.Process().children() == before


SECOND_WRITER = """
import asyncio, sys
from pathlib import Path
from agl_server.store.sqlite import SqliteStore
asyncio.run(SqliteStore(Path(sys.argv[1])).open())
"""


SHOWING = """
import asyncio, signal, sys
from pathlib import Path
from agl_server.store.sqlite import SqliteStore
from agl_view.serving import shown_beside

async def show(folder):
    async with SqliteStore(folder / "store.sqlite"), shown_beside(folder, "127.0.0.1", 0, None) as address:
        print(address, flush=True)
        await asyncio.Event().wait()

signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background jobs ignore it.
asyncio.run(show(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_the_pages_end_with_the_process_that_shows_them(runs: Folder, end: signal.Signals) -> None:
    folder = runs.trained()
    command = [sys.executable, "-c", SHOWING, folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as showing:
        assert showing.stdout is not None
        try:
            address = showing.stdout.readline().strip()
            assert "calc" in opened(address)
            assert is_written(folder / "store.sqlite")
        finally:
            showing.send_signal(end)
            showing.communicate()
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            opened(address)
        except httpx.TransportError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the pages are still there")
    assert not is_written(folder / "store.sqlite")
