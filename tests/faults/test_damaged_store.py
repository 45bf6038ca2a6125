"""A store that was damaged while nobody used it: the next run says so, names the file, and leaves it as it is."""

from __future__ import annotations

import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from .fault_run import PATIENCE, Part, TinyRun
from .fault_storm import wait_for_replies

PAGE = 4096


def emptied(store: Path, chance: random.Random) -> None:
    store.write_bytes(b"")


def truncated(store: Path, chance: random.Random) -> None:
    """By a page at least: the end of the last one may have nothing in it."""
    whole = store.read_bytes()
    store.write_bytes(whole[: chance.randrange(1, len(whole) - PAGE)])


def without_its_beginning(store: Path, chance: random.Random) -> None:
    whole = store.read_bytes()
    store.write_bytes(chance.randbytes(PAGE) + whole[PAGE:])


def with_damaged_pages(store: Path, chance: random.Random) -> None:
    """Every page but the first, where the list of tables is."""
    whole = store.read_bytes()
    store.write_bytes(whole[:PAGE] + chance.randbytes(len(whole) - PAGE))


def replaced(store: Path, chance: random.Random) -> None:
    store.write_text("Dear Sir or Madam, " * chance.randrange(1, 1000))


DAMAGES = (
    emptied,
    truncated,
    without_its_beginning,
    with_damaged_pages,
    replaced,
)
REMEDIES = ("Choose another path", ".recover", "backup")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    """A run that was stopped in good order, by Ctrl-C: all of its store is in the one file."""
    run = TinyRun(tmp_path_factory.mktemp("stopped"), workers=1)
    try:
        run.start()
        wait_for_replies(run, 15)
        run.trainer.process.send_signal(signal.SIGINT)
        run.trainer.process.wait(PATIENCE)
        yield run
    finally:
        run.stop()


def content(folder: Path) -> Mapping[str, bytes]:
    """The store's files; its lock has nothing to lose."""
    return {path.name: path.read_bytes() for path in folder.glob("store.sqlite*") if path.suffix != ".lock"}


@pytest.mark.storm
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_left_alone(
    stopped: TinyRun, chance: random.Random, damage: Callable[[Path, random.Random], None]
) -> None:
    whole = stopped.store.read_bytes()
    try:
        damage(stopped.store, chance)
        before = content(stopped.folder)
        again = stopped.begin(stopped.trainer.name)
        until_ended_or_serving(again)
        told = " ".join(again.log.read_text().split())
        assert not again.running, told
        assert again.process.returncode == 2
        assert str(stopped.store) in told
        assert any(remedy in told for remedy in REMEDIES), told
        assert "Traceback" not in told
        assert content(stopped.folder) == before or damage is emptied, "there, nothing is left to be kept"
    finally:
        again.kill()
        for path in stopped.folder.glob("store.sqlite*"):
            path.unlink()
        stopped.store.write_bytes(whole)


def until_ended_or_serving(part: Part) -> None:
    """Until a training that was started again ends, or leaves its first rollouts to workers."""
    deadline = time.monotonic() + PATIENCE
    while part.running and "leaving the rollouts" not in part.log.read_text():
        assert time.monotonic() < deadline, part.tail()
        time.sleep(0.1)


@pytest.mark.storm
def test_a_damaged_log_is_read_up_to_the_damage(tiny_run: Callable[..., TinyRun], chance: random.Random) -> None:
    """That is what SQLite does with a log that was cut off: what came later was never there, and training goes on."""
    run = tiny_run(workers=1)
    run.start()
    wait_for_replies(run, 15)
    run.trainer.kill()
    log = run.store.with_name(run.store.name + "-wal")
    whole = log.read_bytes()
    place = chance.randrange(len(whole) // 2, len(whole))
    log.write_bytes(whole[:place] + chance.choice([b"", chance.randbytes(len(whole) - place)]))
    run.begin(run.trainer.name)
    wait_for_replies(run, 5)
    steps = run.finish_after(1)
    assert run.summary()["steps"] == steps
    with closing(sqlite3.connect(run.store)) as store:
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)
