"""The schema of the file, and files that are not this agl's."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agl_core.errors import StoreError
from agl_core.store import schema, tables
from agl_core.store.sqlite import SqliteStore


def execute(path: Path, statement: str) -> Any:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchall()


def content(path: Path) -> bytes:
    return path.read_bytes()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("version", [schema.VERSION - 1, schema.VERSION + 1])
async def test_a_file_of_another_version_is_refused(path: Path, version: int, read_only: bool) -> None:
    async with SqliteStore(path):
        pass
    execute(path, f"PRAGMA user_version = {version}")
    before = content(path)
    with pytest.raises(StoreError, match=rf"{path} has schema version {version}, .* cannot read .*: start a new run"):
        await SqliteStore(path, read_only=read_only).open()
    assert content(path) == before


async def test_a_file_that_cannot_be_made_stays_empty(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(schema, "_SCHEMA", "CREATE TABLE half (x); INSERT INTO nowhere VALUES (1)")
        with pytest.raises(StoreError, match=r"store\.sqlite.*no such table: nowhere"):
            await SqliteStore(path).open()
    assert execute(path, "SELECT name FROM sqlite_master") == []
    async with SqliteStore(path) as store:
        assert await store.rollouts() == []


@pytest.mark.parametrize("read_only", [False, True])
async def test_another_programs_database_is_left_alone(path: Path, read_only: bool) -> None:
    execute(path, "CREATE TABLE bookmarks (url)")
    before = content(path)
    with pytest.raises(StoreError, match=r"store\.sqlite is another program's SQLite database"):
        await SqliteStore(path, read_only=read_only).open()
    assert content(path) == before


async def test_the_columns_written_are_the_columns_there(store: SqliteStore, path: Path) -> None:
    for table in tables.TABLES:
        assert [row[1] for row in execute(path, f"PRAGMA table_info({table.name})")] == list(
            dict.fromkeys(["seq", *table.columns])
        )
