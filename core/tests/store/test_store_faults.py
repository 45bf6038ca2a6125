"""What goes wrong with files and disks ends in a StoreError with the file and the remedy."""

from __future__ import annotations

import os
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_core.errors import StoreError
from agl_core.store.connections import explain
from agl_core.store.sqlite import SqliteStore
from agl_core.types import AttemptKey


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """The system refuses to write beyond `size` bytes of any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def damage(path: Path) -> None:
    """Random bytes in place of the file's second half."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(os.urandom(size - size // 2))


def content(path: Path) -> bytes:
    return path.read_bytes()


@pytest.fixture
def letter(path: Path) -> bytes:
    path.write_bytes(b"this is a letter, not a database. " * 200)
    return path.read_bytes()


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_file_that_is_no_database(path: Path, letter: bytes, read_only: bool) -> None:
    with pytest.raises(StoreError, match=r"store\.sqlite is not an SQLite database\. Choose another path"):
        await SqliteStore(path, read_only=read_only).open()
    assert content(path) == letter


async def test_a_damaged_file(path: Path, make_call: Any) -> None:
    async with SqliteStore(path) as store:
        await store.put(*(make_call(f"c{number}", f"r{number}") for number in range(2000)))
    damage(path)
    async with SqliteStore(path, read_only=True) as reader:
        with pytest.raises(StoreError, match=r"store\.sqlite is damaged.*\.recover"):
            await reader.calls([AttemptKey(f"r{number}", 0) for number in range(2000)])
    async with SqliteStore(path) as store:
        with pytest.raises(StoreError, match=r"store\.sqlite is damaged.*\.recover"):
            await store.put(make_call("new"))


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_truncated_file(path: Path, make_call: Any, read_only: bool) -> None:
    async with SqliteStore(path) as store:
        await store.put(make_call("c"))
    os.truncate(path, 5000)
    with pytest.raises(StoreError, match=r"store\.sqlite is damaged"):
        await SqliteStore(path, read_only=read_only).open()


async def test_a_missing_folder_and_a_folder_in_its_place(path: Path) -> None:
    with pytest.raises(StoreError, match=r"Create .*nowhere first"):
        await SqliteStore(path.parent / "nowhere" / "store.sqlite").open()
    with pytest.raises(StoreError, match="is a folder, and the store is a file"):
        await SqliteStore(path.parent).open()


async def test_a_failed_open_can_be_tried_again(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "later" / "store.sqlite")
    with pytest.raises(StoreError):
        await store.open()
    (tmp_path / "later").mkdir()
    async with store:
        assert await store.runs() == []


async def test_a_disk_that_takes_no_more(path: Path, make_call: Any, calls_of: Any) -> None:
    async with SqliteStore(path) as store:
        await store.put(make_call("before"))
        large = make_call("large", prompt_ids=np.arange(200_000, dtype=np.int32))
        with files_up_to(300_000), pytest.raises(StoreError, match=r"store\.sqlite cannot be .*disk's free space"):
            await store.put(large)
        assert set(await calls_of(store, "r")) == {"before"}
        await store.put(large)
        assert set(await calls_of(store, "r")) == {"before", "large"}


def test_a_full_disk_is_called_that(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA max_page_count = 1")
    with pytest.raises(sqlite3.OperationalError) as full:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    assert "store.sqlite cannot grow: the disk is full. Free some space" in str(explain(path, full.value))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_folder_without_permission(path: Path) -> None:
    os.chmod(path.parent, 0o500)
    try:
        with pytest.raises(StoreError, match=r"write there|permissions"):
            await SqliteStore(path).open()
    finally:
        os.chmod(path.parent, 0o700)


async def test_damage_that_sqlite_does_not_notice_is_named_too(tmp_path: Path, make_rollout: Any) -> None:
    path = tmp_path / "store.sqlite"
    async with SqliteStore(path) as store:
        await store.put(make_rollout("r"))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE rollouts SET state = 'queue' || char(0)")
        connection.commit()

    async with SqliteStore(path, read_only=True) as store:
        with pytest.raises(StoreError, match=rf"The store {path} is damaged.*`\.recover`.*backup"):
            await store.rollouts()
