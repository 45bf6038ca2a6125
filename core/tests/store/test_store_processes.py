"""Several processes on one file: kills, a second writer, readers beside a writer."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_core.errors import StoreError
from agl_core.store.sqlite import SqliteStore
from agl_core.types import AttemptKey, Call

CHILD = Path(__file__).with_name("store_child.py")
TASKS = 16

Start = Callable[[int], "subprocess.Popen[str]"]


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
        assert child.stdout is not None
        child.stdout.close()


def acknowledged(child: subprocess.Popen[str], count: int) -> dict[str, str]:
    """Call ids and checksums of the next `count` calls that the child was told are stored."""
    assert child.stdout is not None
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


def files(folder: Path) -> dict[str, int]:
    """Names and times of change."""
    return {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(folder)}


def attempts_of(seed: int) -> list[AttemptKey]:
    return [AttemptKey(f"rollout-{seed}-{task}", 0) for task in range(TASKS)]


async def test_what_was_acknowledged_survives_sigkill(path: Path, start_writer: Start) -> None:
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    draw = random.Random(seed)
    expected: dict[str, str] = {}
    seeds = []
    for number in range(10):
        child_seed = seed + number
        seeds.append(child_seed)
        child = start_writer(child_seed)
        expected |= acknowledged(child, draw.randint(1, 300))
        expected |= kill(child)
        async with SqliteStore(path, read_only=draw.random() < 0.5) as store:
            calls = await store.calls(key for each in seeds for key in attempts_of(each))
        stored = {call.id: checksum(call) for call in calls}
        assert {id: stored.get(id) for id in expected} == expected
        # What was not acknowledged is there as a whole or not at all.
        assert all(call.choices[0].message == {"content": stored[call.id]} for call in calls)
        assert all(call.request["messages"][1]["content"] == stored[call.id] for call in calls)
    assert len(expected) > 10


async def test_another_process_reads_what_was_just_acknowledged(path: Path, start_writer: Start) -> None:
    child = start_writer(1)
    acknowledged(child, 1)
    async with SqliteStore(path, read_only=True) as reader:
        for _ in range(20):
            told = acknowledged(child, 10)
            stored = {call.id: checksum(call) for call in await reader.calls(attempts_of(1))}
            assert told.items() <= stored.items()


async def test_a_second_writer_is_refused_and_a_reader_is_not(path: Path, start_writer: Start) -> None:
    child = start_writer(1)
    told = acknowledged(child, 1)
    with pytest.raises(StoreError, match=rf"store\.sqlite is being written by another process \(process {child.pid}\)"):
        await SqliteStore(path).open()
    async with SqliteStore(path, read_only=True) as reader:
        assert told.keys() <= {call.id for call in await reader.calls(attempts_of(1))}
    assert acknowledged(child, 5)  # refusing did not disturb the writer
    kill(child)
    async with SqliteStore(path):
        pass


async def test_a_second_writer_in_the_same_process_is_refused(store: SqliteStore, path: Path) -> None:
    with pytest.raises(StoreError, match=f"process {os.getpid()}"):
        await SqliteStore(path).open()
    await store.close()
    async with SqliteStore(path):
        pass


async def test_a_reader_creates_no_file(path: Path, make_rollout: Any) -> None:
    with pytest.raises(StoreError, match=r"There is no store at .*store\.sqlite"):
        await SqliteStore(path, read_only=True).open()
    assert os.listdir(path.parent) == []
    async with SqliteStore(path) as store:
        await store.put(make_rollout("r"))
    before = files(path.parent)
    assert "store.sqlite-wal" not in before
    async with SqliteStore(path, read_only=True) as reader:
        assert await reader.rollouts() == [make_rollout("r")]
        assert files(path.parent) == before
    assert files(path.parent) == before


async def test_a_reader_does_not_write(store: SqliteStore, path: Path, make_rollout: Any) -> None:
    async with SqliteStore(path, read_only=True) as reader:
        with pytest.raises(StoreError, match="opened to read only"):
            await reader.put(make_rollout("r"))


async def test_a_reader_that_was_there_first_sees_a_later_writer(path: Path, make_rollout: Any) -> None:
    async with SqliteStore(path):
        pass
    async with SqliteStore(path, read_only=True) as reader:
        assert await reader.rollouts() == []
        for id in ("a", "b"):
            async with SqliteStore(path) as store:
                await store.put(make_rollout(id))
                assert await reader.rollout(id) == make_rollout(id)
            assert await reader.rollout(id) == make_rollout(id)
