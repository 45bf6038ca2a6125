"""Group commit: what is waiting is written in one transaction, and then every caller continues."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeAlias, TypeVar

from agl_core.errors import StoreError
from agl_core.store.codec import Row, Rows, encode
from agl_core.store.connections import BUSY_SECONDS, transaction
from agl_core.store.files import OpenFiles
from agl_core.store.interface import Record
from agl_core.store.pieces import Data, Pieces
from agl_core.store.tables import TABLES, insertion

Result = TypeVar("Result")
Batch: TypeAlias = list[tuple[Rows, asyncio.Future[None]]]

logger = logging.getLogger(__name__)

_ROWS_PER_STATEMENT = 64
_PAUSE = 0.2
"""Seconds between tries to cut the log off, while a reader has it."""
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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agl-store-writer")
        self._waiting: Batch = []
        self._company = 0
        self._idle = asyncio.Event()
        self._idle.set()

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
            # Not at once: what else is put in this turn of the loop comes along.
            loop.call_soon(self._gather, self._company)
        await done

    async def close(self) -> None:
        """Finish what waits, then end the thread and close the connection."""
        await self._idle.wait()
        self._thread.submit(self._connection.close)
        await asyncio.to_thread(self._thread.shutdown)
        self._files.close()

    async def between_writes(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """What `work` returns, which has the connection for itself; then the log is cut off, for what it removed."""
        loop, last = asyncio.get_running_loop(), time.monotonic() + BUSY_SECONDS
        result = await loop.run_in_executor(self._thread, self._checked, work)
        while not await loop.run_in_executor(self._thread, self._checked, self._cut_log_off):
            if time.monotonic() > last:
                logger.warning(
                    "A program has been reading the store %s for long: what was removed is in the log beside the store "
                    "until that program and this one have closed it.",
                    self._path,
                )
                break
            await asyncio.sleep(_PAUSE)
        return result

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

    def _checked(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        self._files.check_all(self._log_is_empty)
        return work(self._connection)

    def _cut_log_off(self, connection: sqlite3.Connection) -> bool:
        """Fold the write-ahead log into the store's file; False if a reader still needs it."""
        connection.execute("PRAGMA busy_timeout = 0")
        try:
            (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            connection.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")
        self._files.were_cut()
        return not busy

    def _log_is_empty(self) -> bool:
        try:
            (_, frames, _) = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error:
            return False
        return bool(frames == 0)

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

    def _finish(self, pieces: list[tuple[int, Data]], batch: Batch, errors: list[Exception | None]) -> None:
        if None not in errors:
            self._pieces.give_back(pieces)
        for (_, done), error in zip(batch, errors, strict=True):
            if done.done():  # its caller was cancelled
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
        if self._waiting:
            self._gather(self._company)
        else:
            self._idle.set()

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
            self._insert(lambda count: f"INSERT INTO pieces VALUES {', '.join(['(?, ?)'] * count)}", pieces)
            for table in TABLES:
                self._insert(partial(insertion, table), [row for rows in batch for row in rows.get(table, ())])

    def _insert(self, statement: Callable[[int], str], rows: Sequence[Row]) -> None:
        start = 0
        while start < len(rows):
            # Powers of two, so that the statements are few and stay prepared.
            count = min(_ROWS_PER_STATEMENT, 1 << (len(rows) - start).bit_length() - 1)
            self._connection.execute(statement(count), tuple(chain.from_iterable(rows[start : start + count])))
            start += count
