"""Group commit: what is waiting is written in one transaction, and then every caller continues."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from agl_core.errors import StoreError
from agl_core.store.codec import Row, Rows, encode
from agl_core.store.connections import BUSY_SECONDS, transaction
from agl_core.store.files import OpenFiles
from agl_core.store.interface import Record
from agl_core.store.pieces import Data, Pieces
from agl_core.store.tables import PIECES, TABLES, Table, insertion

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

_ROWS_PER_STATEMENT = 64
_LARGE_LOG = 16 << 20
"""Bytes of the write-ahead log from which on it is folded into the store's file."""
_HELD_UP_LOG = 4 * _LARGE_LOG
"""Bytes of it from which on readers are worth a warning: short ones, such as pages of a run, only delay the folding."""
_PAUSE = 2.0
"""Seconds without a write after which the log is folded in at any size, and between tries if a reader has it."""
_READERS_MILLISECONDS = 20
"""So long the writer waits for readers to leave the log."""
_COMPANY = 60
"""Turns of the event loop that a transaction waits for more to write, where the one before it had several writes.

Between two threads each transaction costs more than what it writes. A turn is short where little is going on, so no
caller waits long; one that writes one after the other does not wait at all.
"""


class GroupWriter:
    """The one writer. While a transaction runs in its thread, the next one gathers on the event loop.

    Before and after each transaction it looks whether the files are still those that it opened, so that nothing is
    acknowledged that only a removed file has.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, pieces: Pieces) -> None:
        self._path, self._connection = path, connection
        self._pieces = pieces
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        self._files = OpenFiles(path, page_size)
        self._fold_after = 0.0
        """Before this time, folding the log in is of no use."""
        self._warned_of_readers = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agl-store-writer")
        self._waiting: list[tuple[Rows, asyncio.Future[None]]] = []
        self._company = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._folding: asyncio.TimerHandle | None = None

    async def put(self, records: Iterable[Record]) -> None:
        """Write these records, all or none; returns once they are committed.

        Raises StoreError for a record that cannot be stored, else what SQLite raised.
        """
        rows = encode(records, self._pieces)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.append((rows, done))
        if self._idle.is_set():
            self._idle.clear()
            self._fold_later(None)
            # Not at once: what else is put in this turn of the loop comes along.
            loop.call_soon(self._gather, self._company)
        await done

    async def close(self) -> None:
        """Finish what waits, then end the thread and close the connection."""
        await self._idle.wait()
        self._fold_later(None)
        self._thread.submit(self._close)
        await asyncio.to_thread(self._thread.shutdown)

    async def between_writes(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """What `work` returns, which has the connection for itself; then the log is folded in."""

        def run() -> Result:
            self._files.check_all(self._log_is_empty)
            try:
                return work(self._connection)
            finally:
                self._fold()

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    async def erase(self, work: Callable[[sqlite3.Connection, int], Result]) -> Result:
        """What `work` returns; it may remove pieces below the number that it gets.

        What was put before refers to such pieces, and is written before. What is put from now on does not.
        """
        first = self._pieces.forget()
        await self.put(())
        return await self.between_writes(lambda connection: work(connection, first))

    def check(self) -> None:
        """Raise StoreError if other files have taken the place of those that are written."""
        self._files.check()

    def _gather(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._gather, turns - 1)
        else:
            self._start()

    def _start(self) -> None:
        batch, self._waiting = self._waiting, []
        self._company = _COMPANY if len(batch) > 1 else 0
        pieces, loop = self._pieces.take(), asyncio.get_running_loop()

        def write() -> None:
            errors = self._write_each(pieces, [rows for rows, _ in batch])
            loop.call_soon_threadsafe(self._finish, pieces, batch, errors)

        self._thread.submit(write)  # `run_in_executor` takes twice as long: it makes two futures and a chain of them

    def _finish(
        self,
        pieces: list[tuple[int, Data]],
        batch: list[tuple[Rows, asyncio.Future[None]]],
        errors: list[Exception | None],
    ) -> None:
        if None not in errors:
            self._pieces.give_back(pieces)
        for (_, done), error in zip(batch, errors, strict=True):
            if done.done():  # its caller was cancelled
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
        if self._files.log_size >= _LARGE_LOG and time.monotonic() >= self._fold_after:
            self._thread.submit(self._fold)
        if self._waiting:
            self._gather(self._company)
        else:
            self._idle.set()
            self._fold_later(_PAUSE)

    def _fold_later(self, seconds: float | None) -> None:
        """Fold the log in after so many seconds without a write; None: not now."""
        if self._folding is not None:
            self._folding.cancel()
        loop = asyncio.get_running_loop()
        self._folding = None if seconds is None else loop.call_later(seconds, self._fold_when_idle)

    def _fold_when_idle(self) -> None:
        def folded(finished: asyncio.Future[bool]) -> None:
            if not finished.result() and self._idle.is_set() and self._folding is not None:
                self._fold_later(_PAUSE)  # A reader is there yet.

        asyncio.get_running_loop().run_in_executor(self._thread, self._fold).add_done_callback(folded)

    def _fold(self) -> bool:
        """Fold the write-ahead log into the store's file, and cut it off; whether no reader prevents that.

        A reader keeps the part of the log that was written since it began: the log grows until it leaves.
        """
        try:
            self._files.check_all(self._log_is_empty)
            self._connection.execute(f"PRAGMA busy_timeout = {_READERS_MILLISECONDS}")
            try:
                (busy, _, _) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                self._connection.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")
            self._files.log_was_folded_in()
        except (sqlite3.Error, StoreError) as error:
            logger.error("The log of the store %s could not be folded into it: %s", self._path, error)
            return True  # The next write raises what is wrong, if it still is.
        if not busy:
            self._fold_after, self._warned_of_readers = 0.0, False
            return True
        self._fold_after = time.monotonic() + _PAUSE
        if self._files.log_size >= _HELD_UP_LOG and not self._warned_of_readers:
            self._warned_of_readers = True
            logger.warning(
                "A program has been reading the store %s for long: until it is done the log beside the store, of %d "
                "MiB now, grows with all that is written.",
                self._path,
                self._files.log_size >> 20,
            )
        return False

    def _close(self) -> None:
        self._fold()
        self._connection.close()
        self._files.close()

    def _log_is_empty(self) -> bool:
        try:
            (_, frames, _) = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error:
            return False
        return bool(frames == 0)

    def _write_each(self, pieces: list[tuple[int, Data]], batch: list[Rows]) -> list[Exception | None]:
        """Write them together; if one of them makes that fail, one by one. Returns each one's error.

        Pieces are committed with the first that succeeds.
        """
        try:
            self._files.check_all(self._log_is_empty)
            self._write(pieces, batch)
            self._files.check_all(self._log_is_empty)
        except (sqlite3.OperationalError, StoreError) as error:  # the disk, the file or a lock: all fail alike
            return [error] * len(batch)
        except Exception as error:
            if len(batch) == 1:
                return [error]
            errors: list[Exception | None] = []
            for rows in batch:
                errors += self._write_each([] if None in errors else pieces, [rows])
            return errors
        return [None] * len(batch)

    def _write(self, pieces: list[tuple[int, Data]], batch: list[Rows]) -> None:
        with transaction(self._connection):
            self._insert(PIECES, pieces)
            for table in TABLES:
                self._insert(table, [row for rows in batch for row in rows.get(table, ())])

    def _insert(self, table: Table[Any], rows: Sequence[Row]) -> None:
        start = 0
        while start < len(rows):
            # Powers of two, so that the statements are few and stay prepared.
            count = min(_ROWS_PER_STATEMENT, 1 << (len(rows) - start).bit_length() - 1)
            self._connection.execute(insertion(table, count), tuple(chain.from_iterable(rows[start : start + count])))
            start += count
