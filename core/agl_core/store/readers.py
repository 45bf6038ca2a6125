"""Reading beside the writer, in a few threads, each with its own connection."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from agl_core.store.database import connect_reader, log_of

Result = TypeVar("Result")
Query = Callable[[sqlite3.Connection], Result]


class Readers:
    """Runs queries, each in one read transaction: it sees everything that was committed before it began."""

    def __init__(self, path: Path, threads: int = 2) -> None:
        self._path = path
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="agl-store-reader")
        self._idle: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()

    async def run(self, query: Query[Result]) -> Result:
        """The query's result. Raises StoreError, or sqlite3.Error."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, query)

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        while not self._idle.empty():
            self._idle.get().close()

    def _run(self, query: Query[Result]) -> Result:
        if not log_of(self._path).exists():
            # Nobody writes: read without making a log. If a writer came meanwhile, what was read may be torn.
            try:
                with closing(connect_reader(self._path, unchanging=True)) as connection:
                    result = _read(connection, query)
            except sqlite3.Error:
                if not log_of(self._path).exists():
                    raise
            else:
                if not log_of(self._path).exists():
                    return result
        try:
            connection = self._idle.get_nowait()
        except queue.Empty:
            connection = connect_reader(self._path, unchanging=False)
        try:
            return _read(connection, query)
        finally:
            self._idle.put(connection)


def _read(connection: sqlite3.Connection, query: Query[Result]) -> Result:
    connection.execute("BEGIN")
    try:
        return query(connection)
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
