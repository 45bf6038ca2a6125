"""The files of a store that is written: nothing is acknowledged that is not in them, and one process writes."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_core.errors import StoreError
from agl_core.store.sqlite import SqliteStore

CHILD = Path(__file__).with_name("store_child.py")
PATIENCE = 30.0


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def replace(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rename_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("renamed"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "store.sqlite"


@pytest.mark.parametrize("which", ["store", "log"])
@pytest.mark.parametrize("fault", [Path.unlink, move, replace, empty, halve, rename_folder])
async def test_nothing_is_acknowledged_once_the_files_are_not_whole(
    path: Path, make_call: Any, which: str, fault: Callable[[Path], None]
) -> None:
    async with SqliteStore(path) as store:
        await store.put(*(make_call(f"c{number}", f"r{number}") for number in range(100)))
        fault(path if which == "store" else log_of(path))
        for again in ("d", "e"):
            with pytest.raises(StoreError, match=rf"The store {path} can no longer be written: .*{path.name}.*backup"):
                await store.put(make_call(again))


async def test_what_others_put_in_the_stores_place_is_not_read(path: Path, make_rollout: Any) -> None:
    other = path.with_name("other.sqlite")
    async with SqliteStore(other) as store:
        await store.put(make_rollout("other"))
    async with SqliteStore(path) as store:
        await store.put(make_rollout("r"))
        other.replace(path)
        with pytest.raises(StoreError, match="another file was put in the place of"):
            await store.rollouts()


async def test_a_log_that_is_cut_off_under_load_is_noticed(path: Path, make_call: Any) -> None:
    async def put_without_end(store: SqliteStore, task: int) -> None:
        for number in range(10**9):
            await store.put(make_call(f"{task}-{number}"))

    async def cut() -> None:
        await asyncio.sleep(0.05)
        await asyncio.to_thread(os.truncate, log_of(path), 0)

    async with SqliteStore(path) as store, asyncio.timeout(PATIENCE):
        writing = [asyncio.create_task(put_without_end(store, task)) for task in range(8)]
        await cut()
        for each in writing:
            with pytest.raises(StoreError, match="was cut off"):
                await each


async def test_a_log_that_another_program_folds_in_is_no_loss(path: Path, make_rollout: Any, make_call: Any) -> None:
    async with SqliteStore(path) as store:
        await store.put(*(make_call(f"c{number}", f"r{number}") for number in range(100)))
        with closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert log_of(path).stat().st_size == 0
        await store.put(make_rollout("after"))
        assert (await store.rollout("after")).id == "after"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A program that reads, and does not end its query."""
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM calls").fetchone()
        yield


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def size(path: Path) -> int:
    return path.stat().st_size


async def test_the_log_is_cut_off_when_readers_leave(
    path: Path, make_call: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_core.store.writer._PAUSE", 0.05)
    large = np.arange(1_000_000, dtype=np.int32)
    async with SqliteStore(path) as store:
        with reading(path):
            for number in range(18):
                await store.put(make_call(f"c{number}", prompt_ids=large + number))
                if number == 5:
                    assert size(log_of(path)) > 20_000_000
                    assert not caplog.text, "a short reader is nothing to warn of"
            assert size(log_of(path)) > 68_000_000
        await asyncio.to_thread(until, lambda: size(log_of(path)) == 0)
        assert size(path) > 20_000_000
        await store.put(make_call("after"))
    assert "has been reading the store" in caplog.text


async def test_the_log_does_not_grow_without_readers(path: Path, make_call: Any) -> None:
    async with SqliteStore(path) as store:
        for number in range(15):
            await store.put(make_call(f"c{number}", prompt_ids=np.arange(500_000, dtype=np.int32) + number))
            assert size(log_of(path)) < 24_000_000


def foreign_text(lock: Path) -> None:
    lock.write_text("12345\n")


def foreign_folder(lock: Path) -> None:
    lock.mkdir()


def foreign_database(lock: Path) -> None:
    with closing(sqlite3.connect(lock)) as other, other:
        other.execute("CREATE TABLE t (x)")


@pytest.mark.parametrize("make", [foreign_text, foreign_folder, foreign_database])
async def test_no_file_beside_the_store_blocks_a_start(path: Path, make: Callable[[Path], None]) -> None:
    make(path.with_name("store.sqlite.lock"))
    async with SqliteStore(path) as store:
        assert await store.runs() == []


async def test_a_second_process_is_refused_whatever_else_is_removed_and_read(path: Path, make_rollout: Any) -> None:
    async with SqliteStore(path) as store:
        await store.put(make_rollout("r"))
        async with SqliteStore(path, read_only=True) as reader:
            await reader.rollouts()
        with closing(sqlite3.connect(path)) as other:
            other.execute("SELECT count(*) FROM rollouts").fetchone()
        for beside in path.parent.iterdir():
            if beside.name not in (path.name, log_of(path).name, f"{path.name}-shm"):
                beside.unlink()
        linked = path.parent.with_name("linked")
        linked.symlink_to(path.parent)
        for name in (path, linked / path.name):
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, CHILD, name, "1", "1"],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
            assert done.returncode == 1
            assert f"is being written by another process (process {os.getpid()})" in done.stderr
        await store.put(make_rollout("s"))
    async with SqliteStore(path):
        pass
