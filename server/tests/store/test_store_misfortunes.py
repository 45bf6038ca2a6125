"""Misfortunes: kills, a full disk, damage, files that are taken away, other programs, a second writer."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_core.errors import StoreError, StoreRefusedError
from agl_core.testing import episodes as make
from agl_core.types import AttemptKey, Call
from agl_server.store import connections
from agl_server.store.connections import VERSION, is_written, lock_of, log_of
from agl_server.store.sqlite import SqliteStore

from .any_records import calls_of, make_call

CHILD = Path(__file__).with_name("store_child.py")
TASKS = 16
Start = Callable[[int], "subprocess.Popen[str]"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "store.sqlite"


# Kills and several processes.


@pytest.fixture
def start_writer(path: Path) -> Iterator[Start]:
    children: list[subprocess.Popen[str]] = []

    def start(seed: int) -> subprocess.Popen[str]:
        command = [sys.executable, str(CHILD), str(path), str(seed), str(TASKS)]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def acknowledged(child: subprocess.Popen[str], count: int) -> dict[str, str]:
    """Call ids and checksums of the next `count` calls that the child was told are stored."""
    lines = (child.stdout.readline() for _ in range(count))
    return dict(line.split() for line in lines)


def kill(child: subprocess.Popen[str]) -> dict[str, str]:
    """Kill it without warning; what it had acknowledged and nobody had read yet."""
    child.send_signal(signal.SIGKILL)
    rest, _ = child.communicate()
    assert child.returncode == -signal.SIGKILL
    return dict(line.split() for line in rest.splitlines(keepends=True) if line.endswith("\n"))


def checksum(call: Call) -> str:
    (choice,) = call.choices
    arrays = (call.prompt_ids, choice.response_ids, choice.logprobs)
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays if array is not None)).hexdigest()


def attempts_of(seed: int) -> list[AttemptKey]:
    return [AttemptKey(f"rollout-{seed}-{task}", 0) for task in range(TASKS)]


async def test_what_was_acknowledged_survives_sigkill(path: Path, start_writer: Start) -> None:
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    draw = random.Random(seed)
    expected: dict[str, str] = {}
    for number in range(3):
        child = start_writer(seed + number)
        expected |= acknowledged(child, draw.randint(1, 300))
        expected |= kill(child)
        async with SqliteStore(path, read_only=draw.random() < 0.5) as store:
            calls = await store.calls(key for n in range(number + 1) for key in attempts_of(seed + n))
        stored = {call.id: checksum(call) for call in calls}
        assert {id: stored.get(id) for id in expected} == expected
        # What was not acknowledged is there as a whole or not at all.
        assert all(call.choices[0].message == {"content": stored[call.id]} for call in calls)
        assert all(call.request["messages"][1]["content"] == stored[call.id] for call in calls)
    assert len(expected) > 10


async def test_readers_are_let_in_beside_a_writer_and_a_second_writer_is_not(path: Path, start_writer: Start) -> None:
    child = start_writer(1)
    confirmed = acknowledged(child, 1)
    linked = path.parent.with_name("linked")
    linked.symlink_to(path.parent)
    for name in (path, linked / path.name):
        with pytest.raises(StoreError, match="being written by another process"):
            await SqliteStore(name).open()
    async with SqliteStore(path, read_only=True) as reader:
        for _ in range(4):
            confirmed |= acknowledged(child, 10)
            stored = {call.id: checksum(call) for call in await reader.calls(attempts_of(1))}
            assert confirmed.items() <= stored.items()
    assert is_written(path)
    lock_of(path).rename(path.with_name("lock"))
    with pytest.raises(StoreError, match="being written by another process"):
        await SqliteStore(path).open()
    path.with_name("lock").rename(lock_of(path))
    kill(child)
    assert not is_written(path)
    async with SqliteStore(path):
        assert is_written(path)
        with pytest.raises(StoreError, match="being written by another process"):
            await SqliteStore(path).open()


async def test_a_reader_makes_no_file_and_sees_later_writers(path: Path) -> None:
    def files() -> dict[str, int]:
        return {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(path.parent)}

    with pytest.raises(StoreError, match=r"There is no store at .*store\.sqlite"):
        await SqliteStore(path, read_only=True).open()
    assert files() == {}
    async with SqliteStore(path):
        pass
    before = files()
    async with SqliteStore(path, read_only=True) as reader:
        assert await reader.rollouts() == []
        assert files() == before
        for id in ("a", "b"):
            async with SqliteStore(path) as store:
                await store.put(make.rollout(id))
                assert await reader.rollout(id) == make.rollout(id)
            assert await reader.rollout(id) == make.rollout(id)


# The disk, and damage.


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """The system refuses to write beyond `size` bytes of any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_disk_that_takes_no_more(path: Path) -> None:
    async with SqliteStore(path) as store:
        await store.put(make_call("before"))
        large = make_call("large", prompt_ids=np.arange(200_000, dtype=np.int32))
        with files_up_to(300_000), pytest.raises(StoreError, match=r"store\.sqlite cannot be .*disk's free space"):
            await store.put(large)
        assert set(await calls_of(store, "r")) == {"before"}
        await store.put(large)
        assert set(await calls_of(store, "r")) == {"before", "large"}


async def test_a_key_alone_is_refused_and_is_no_damage(path: Path) -> None:
    async with SqliteStore(path) as store:
        key = AttemptKey("r", 0)
        for read in (store.calls, store.tool_results, store.rewards, store.training_records, store.annotations):
            with pytest.raises(StoreRefusedError, match=r"pass \[AttemptKey\(rollout='r', attempt=0\)\]"):
                await read(key)  # type: ignore[arg-type]


async def test_damage_is_named(path: Path) -> None:
    damaged = r"store\.sqlite is damaged.*\.recover.*backup"
    async with SqliteStore(path) as store:
        await store.put(make.rollout("r"), *(make_call(f"c{number}", f"r{number}") for number in range(2000)))
    whole = path.read_bytes()

    execute(path, "UPDATE rollouts SET body = replace(body, 'queued', 'queue')")  # SQLite does not notice this.
    async with SqliteStore(path, read_only=True) as reader:
        with pytest.raises(StoreError, match=damaged):
            await reader.rollouts()

    path.write_bytes(whole[: len(whole) // 2] + os.urandom(len(whole) // 2))
    async with SqliteStore(path, read_only=True) as reader:
        with pytest.raises(StoreError, match=damaged):
            await reader.calls([AttemptKey(f"r{number}", 0) for number in range(2000)])
    async with SqliteStore(path) as store:
        with pytest.raises(StoreError, match=damaged):
            await store.put(make_call("new"))

    path.write_bytes(whole[:5000])
    for read_only in (False, True):
        with pytest.raises(StoreError, match=r"store\.sqlite is damaged"):
            await SqliteStore(path, read_only=read_only).open()


def execute(path: Path, statement: str) -> Any:
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement).fetchall()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        (None, r"store\.sqlite is not an SQLite database\. Choose another path"),
        ("CREATE TABLE bookmarks (url)", r"store\.sqlite is another program's SQLite database"),
        (f"PRAGMA user_version = {VERSION - 1}", r"has schema version \d+, .* cannot read .*: start a new run"),
        (f"PRAGMA user_version = {VERSION + 1}", r"has schema version \d+, .* cannot read .*: start a new run"),
    ],
)
async def test_a_file_that_is_not_this_agls_is_refused_and_left_alone(
    path: Path, statement: str | None, problem: str, read_only: bool
) -> None:
    if statement is None:
        path.write_bytes(b"this is a letter, not a database. " * 200)
    else:
        if "version" in statement:
            async with SqliteStore(path):
                pass
        execute(path, statement)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=problem):
        await SqliteStore(path, read_only=read_only).open()
    assert path.read_bytes() == before


async def test_an_open_that_failed_can_be_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(path.parent / "later" / "store.sqlite")
    with pytest.raises(StoreError, match=r"Create .*later first"):
        await store.open()
    with pytest.raises(StoreError, match="cannot be used"):
        await SqliteStore(path.parent).open()
    (path.parent / "later").mkdir()
    with monkeypatch.context() as broken:
        broken.setattr(connections, "SCHEMA", ("CREATE TABLE half (x)", "INSERT INTO nowhere VALUES (1)"))
        with pytest.raises(StoreError, match=r"store\.sqlite.*no such table: nowhere"):
            await store.open()
    with pytest.raises(StoreError, match="is empty"):
        await SqliteStore(path.parent / "later" / "store.sqlite", read_only=True).open()
    async with store:
        assert await store.runs() == []


# Files that are taken away from a writer.


def replace(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


def rename_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("renamed"))


@pytest.mark.parametrize("which", ["store", "log"])
@pytest.mark.parametrize("fault", [Path.unlink, replace, rename_folder])
async def test_nothing_is_acknowledged_once_the_files_are_gone(
    path: Path, which: str, fault: Callable[[Path], None]
) -> None:
    lost = rf"The store {path} can no longer be written: .*{path.name}.*backup"
    async with SqliteStore(path) as store:
        await store.put(*(make_call(f"c{number}", f"r{number}") for number in range(100)))
        fault(path if which == "store" else log_of(path))
        for again in ("d", "e"):
            with pytest.raises(StoreError, match=lost):
                await store.put(make_call(again))
        with pytest.raises(StoreError, match=lost):
            await store.rollouts()


async def test_the_log_does_not_grow_without_end(path: Path) -> None:
    async with SqliteStore(path) as store:
        for number in range(30):
            await store.put(make_call(f"c{number}", prompt_ids=np.arange(500_000, dtype=np.int32) + number))
            assert log_of(path).stat().st_size < 24_000_000
