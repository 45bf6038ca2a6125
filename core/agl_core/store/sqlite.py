"""The default store: one SQLite file in WAL mode, one writer, any number of readers."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from agl_core.errors import StoreError
from agl_core.plugins import NoOptions
from agl_core.store import queries
from agl_core.store.codec import name_of
from agl_core.store.database import WriterLock, check_folder, connect_writer
from agl_core.store.faults import damaged, explain
from agl_core.store.interface import Record
from agl_core.store.pieces import Pieces
from agl_core.store.readers import Readers
from agl_core.store.writer import GroupWriter
from agl_core.types import (
    Attempt,
    AttemptKey,
    Call,
    Mode,
    Outcome,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Use,
)

Result = TypeVar("Result")


class SqliteStore:
    """A `Store` in one SQLite file; see that protocol for what each method promises.

    One process may write; a second writer is refused with a StoreError. Other processes may read meanwhile:

        async with SqliteStore(folder / "store.sqlite", read_only=True) as store:
            rollout = await store.rollout("3f2a")

    A read-only store creates no file and never waits for the writer. All methods belong to the event loop
    that opened the store. Raises StoreError, naming the file and the remedy.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        self._read_only = read_only
        self._readers: Readers | None = None
        self._writer: GroupWriter | None = None
        self._lock: WriterLock | None = None

    async def open(self) -> None:
        if self._readers is not None:
            raise StoreError(f"The store {self._path} is open already. Open it once, and share it.")
        readers = Readers(self._path)
        try:
            if not self._read_only:
                self._lock, connection, pieces = await asyncio.to_thread(self._claim)
                self._writer = GroupWriter(connection, pieces)
            await readers.run(lambda connection: None)
        except sqlite3.Error as error:
            await self._close(readers)
            raise explain(self._path, error) from error
        except BaseException:
            await self._close(readers)
            raise
        self._readers = readers

    async def close(self) -> None:
        readers, self._readers = self._readers, None
        if readers is not None:
            await self._close(readers)

    async def put(self, *records: Record) -> None:
        if self._readers is None or self._writer is None:
            raise StoreError(
                f"The store {self._path} was opened to read only. Write through the process that runs the training."
                if self._read_only
                else f"The store {self._path} is not open. Open it first (`async with`), and do not use it once closed."
            )
        if not records:
            return
        try:
            await self._writer.put(records)
        except (sqlite3.Error, ValueError, OverflowError) as error:
            raise explain(self._path, error, " or ".join(map(name_of, records))) from error

    async def runs(self) -> list[Run]:
        return await self._read(queries.runs)

    async def rollouts(
        self,
        *,
        run: str | None = None,
        step: int | None = None,
        mode: Mode | None = None,
        state: RolloutState | None = None,
        group: str | None = None,
        limit: int | None = None,
    ) -> list[Rollout]:
        filters: dict[str, Any] = {"run": run, "step": step, "mode": mode, "state": state, "grp": group}
        wanted = {column: value for column, value in filters.items() if value is not None}
        return await self._read(lambda connection: queries.rollouts(connection, wanted, limit))

    async def rollout(self, prefix: str) -> Rollout:
        """The rollout whose id is `prefix`, else the only one whose id starts with it."""
        return await self._read(lambda connection: queries.rollout(connection, prefix, str(self._path)))

    async def attempts(self, rollout: str) -> list[Attempt]:
        return await self._read(lambda connection: queries.attempts(connection, rollout))

    async def calls(self, attempts: Iterable[AttemptKey]) -> list[Call]:
        keys = tuple(attempts)
        return await self._read(lambda connection: queries.calls(connection, keys))

    async def outcomes(self, attempts: Iterable[AttemptKey]) -> list[Outcome]:
        keys = tuple(attempts)
        return await self._read(lambda connection: queries.outcomes(connection, keys))

    async def rewards(self, attempts: Iterable[AttemptKey]) -> list[Reward]:
        keys = tuple(attempts)
        return await self._read(lambda connection: queries.rewards(connection, keys))

    async def uses(self, attempts: Iterable[AttemptKey]) -> list[Use]:
        keys = tuple(attempts)
        return await self._read(lambda connection: queries.uses(connection, keys))

    async def __aenter__(self) -> SqliteStore:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _claim(self) -> tuple[WriterLock, sqlite3.Connection, Pieces]:
        check_folder(self._path)
        lock = WriterLock(self._path)
        try:
            connection = connect_writer(self._path)
            return lock, connection, Pieces(queries.next_piece(connection))
        except BaseException:
            lock.release()
            raise

    async def _close(self, readers: Readers) -> None:
        # The writer last: the connection that closes last folds the log into the file.
        await readers.close()
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    async def _read(self, query: Callable[[sqlite3.Connection], Result]) -> Result:
        if self._readers is None:
            raise StoreError(f"The store {self._path} is not open. Open it first (`async with`), not once closed.")
        try:
            return await self._readers.run(query)
        except sqlite3.Error as error:
            raise explain(self._path, error) from error
        except (TypeError, ValueError, LookupError) as error:  # SQLite does not notice damage inside a value.
            raise damaged(self._path, error) from error


def build(options: NoOptions, folder: Path, read_only: bool = False) -> SqliteStore:
    """One SQLite file in the run's folder; readable while training runs."""
    return SqliteStore(folder / "store.sqlite", read_only=read_only)
