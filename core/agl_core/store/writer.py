"""Group commit: what is waiting is written in one transaction, and then everyone waiting is told."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from agl_core.store.codec import Row, Rows, encode
from agl_core.store.interface import Record
from agl_core.store.pieces import Data, Pieces
from agl_core.store.schema import PIECES, TABLES, Table, insertion

_ROWS_PER_STATEMENT = 64
_COMPANY = 60
"""Turns of the event loop that a transaction waits for more to write, where the one before it had several writes.

Between two threads each transaction costs more than what it writes. A turn is short where little is going on, so that
nobody waits long; a caller that writes one after the other does not wait at all.
"""


class GroupWriter:
    """The one writer. While a transaction runs in its thread, the next one gathers on the event loop."""

    def __init__(self, connection: sqlite3.Connection, pieces: Pieces) -> None:
        self._connection = connection
        self._pieces = pieces
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agl-store-writer")
        self._waiting: list[tuple[Rows, asyncio.Future[None]]] = []
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

    def _gather(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._gather, turns - 1)
        else:
            self._start()

    def _start(self) -> None:
        batch, self._waiting = self._waiting, []
        self._company = _COMPANY if len(batch) > 1 else 0
        pieces = self._pieces.take()
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._thread, self._write_each, pieces, [rows for rows, _ in batch])
        running.add_done_callback(lambda finished: self._finish(pieces, batch, finished.result()))

    def _finish(
        self,
        pieces: list[tuple[int, Data]],
        batch: list[tuple[Rows, asyncio.Future[None]]],
        errors: list[Exception | None],
    ) -> None:
        if None not in errors:
            self._pieces.give_back(pieces)
        for (_, done), error in zip(batch, errors, strict=True):
            if done.done():  # whoever waited was cancelled
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
            self._write(pieces, batch)
        except sqlite3.OperationalError as error:  # the disk, the file or a lock: all fail alike
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
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            self._insert(PIECES, pieces)
            for table in TABLES:
                self._insert(table, [row for rows in batch for row in rows.get(table, ())])
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _insert(self, table: Table, rows: Sequence[Row]) -> None:
        start = 0
        while start < len(rows):
            # Powers of two, so that the statements are few and stay prepared.
            count = min(_ROWS_PER_STATEMENT, 1 << (len(rows) - start).bit_length() - 1)
            self._connection.execute(insertion(table, count), tuple(chain.from_iterable(rows[start : start + count])))
            start += count
