"""Group commit: what is waiting is written in one transaction, and then everyone waiting is told."""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from agl_core.store.codec import Row, Rows
from agl_core.store.pieces import SeenPieces
from agl_core.store.schema import PIECES, TABLES, Table, upsert

_ROWS_PER_STATEMENT = 64


class GroupWriter:
    """The one writer. While a transaction runs in its thread, the next one gathers on the event loop."""

    def __init__(self, connection: sqlite3.Connection, seen: SeenPieces) -> None:
        self._connection = connection
        self._seen = seen
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agl-store-writer")
        self._waiting: list[tuple[Rows, asyncio.Future[None]]] = []
        self._idle = asyncio.Event()
        self._idle.set()

    async def commit(self, rows: Rows) -> None:
        """Write these rows, all or none; returns once they are committed. Raises what SQLite raised."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.append((rows, done))
        if self._idle.is_set():
            self._idle.clear()
            # Not at once: what else is put in this turn of the loop comes along.
            loop.call_soon(self._start)
        await done

    async def close(self) -> None:
        """Finish what waits, then end the thread and close the connection."""
        await self._idle.wait()
        self._thread.submit(self._connection.close)
        await asyncio.to_thread(self._thread.shutdown)

    def _start(self) -> None:
        batch, self._waiting = self._waiting, []
        running = asyncio.get_running_loop().run_in_executor(
            self._thread, self._write_each, [rows for rows, _ in batch]
        )
        running.add_done_callback(lambda finished: self._finish(batch, finished))

    def _finish(
        self,
        batch: list[tuple[Rows, asyncio.Future[None]]],
        finished: asyncio.Future[list[Exception | None]],
    ) -> None:
        for (rows, done), error in zip(batch, finished.result(), strict=True):
            if error is None:
                self._seen.add(digest for digest, _ in rows.get(PIECES, ()))
            if done.done():  # whoever waited was cancelled
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
        if self._waiting:
            self._start()
        else:
            self._idle.set()

    def _write_each(self, batch: list[Rows]) -> list[Exception | None]:
        """Write them together; what fails because of one of them is written one by one."""
        try:
            self._write(batch)
        except sqlite3.OperationalError as error:  # the disk, the file or a lock: all fail alike
            return [error] * len(batch)
        except Exception as error:
            if len(batch) == 1:
                return [error]
            return [outcome for rows in batch for outcome in self._write_each([rows])]
        return [None] * len(batch)

    def _write(self, batch: list[Rows]) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for table in TABLES:
                self._insert(table, [row for rows in batch for row in rows.get(table, ())])
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _insert(self, table: Table, rows: list[Row]) -> None:
        start = 0
        while start < len(rows):
            # Powers of two, so that the statements are few and stay prepared.
            count = min(_ROWS_PER_STATEMENT, 1 << (len(rows) - start).bit_length() - 1)
            self._connection.execute(upsert(table, count), tuple(chain.from_iterable(rows[start : start + count])))
            start += count
