"""SQL execution match, on a real SQLite file."""

from __future__ import annotations

import resource
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agl_core import kinds
from agl_core.errors import ConfigError
from agl_rewards import run_query, sql_match

from . import conftest as make

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
MANY = ", ".join(["printf('%9999s', i)"] * 900)
LONG = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"


PATTERN = "replace(hex(zeroblob(24990)), '00', 'a')"
ONE_LONG_CALL = f"SELECT replace(hex(zeroblob(499990)), '00', 'a') LIKE '%' || {PATTERN} || 'b'"
"""One instruction of SQLite's, of many seconds."""


def most_memory() -> int:
    """The most bytes that this process, or one that it started, ever held."""
    most = max(resource.getrusage(of).ru_maxrss for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return most * (1 if sys.platform == "darwin" else 1024)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    file = tmp_path / "pets.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(
            "CREATE TABLE pet (name TEXT, age INTEGER, weight REAL);"
            "INSERT INTO pet VALUES ('Ada', 3, 4.5), ('Bo', 1, 4.5), ('Cy', 7, 0.1);"
            "CREATE TABLE city (name TEXT, land TEXT, PRIMARY KEY (name, land)) WITHOUT ROWID;"
            "INSERT INTO city VALUES ('Bonn', 'de'), ('Graz', 'at'), ('Kiel', 'de'), ('Ulm', 'de');"
            "CREATE TRIGGER kept BEFORE DELETE ON city BEGIN SELECT raise(ABORT, 'kept'); END;"
        )
    return file


@pytest.fixture
def judged(database: Path) -> Callable[..., Any]:
    """The value of an agent's query against the expected one."""

    async def value(answer: Any, expected: str, **settings: Any) -> float:
        episode = make.episode(result=answer, metadata={"sql": expected, "database": str(database)})
        return float(await make.rule(kinds.REWARD, "sql_match", field="sql", **settings)(episode))

    return value


def fingerprint(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("answer", "expected", "value"),
    [
        ("SELECT name FROM pet WHERE age > 2", "SELECT name FROM pet WHERE age >= 3", 1.0),
        ("SELECT name FROM pet ORDER BY name DESC", "SELECT name FROM pet", 1.0),
        ("SELECT name FROM pet ORDER BY name DESC", "SELECT name FROM pet ORDER BY name", 0.0),
        ("SELECT name FROM pet", "SELECT name FROM (SELECT * FROM pet ORDER BY age)", 1.0),
        ("SELECT name AS n FROM pet", "SELECT name FROM pet", 1.0),
        ("SELECT weight FROM pet", "SELECT DISTINCT weight FROM pet", 0.0),
        ("SELECT age, name FROM pet", "SELECT name, age FROM pet", 0.0),
        ("SELECT count(*) FROM pet", "SELECT 3.0", 1.0),
        ("SELECT 0.1 + 0.2", "SELECT 0.3", 1.0),
        ("SELECT '1'", "SELECT 1", 0.0),
        ("SELECT NULL", "SELECT ''", 0.0),
        ("SELECT name FROM pet WHERE age > 99", "SELECT name FROM pet WHERE age < 0", 1.0),
        ("SELECT 1 WHERE 0", "SELECT name FROM pet WHERE age < 0", 0.0),
        ("SELECT name FROM pet WHERE 0", "SELECT name FROM pet WHERE age < 0", 0.0),
        ("SELECT 0", "SELECT count(*) FROM pet WHERE age < 0", 0.0),
        ("SELECT count(name) FROM pet WHERE age > 99", "SELECT count(*) FROM pet WHERE age < 0", 1.0),
        ("SELECT NULL", "SELECT max(age) FROM pet WHERE age < 0", 0.0),
        ("SELECT 3", "SELECT count(*) FROM pet", 0.0),
        ("SELECT 3 FROM pet LIMIT 1", "SELECT count(*) FROM pet", 0.0),
        ("SELECT count(*) * 0 + 3 FROM pet", "SELECT count(*) FROM pet", 0.0),
        ("SELECT 'Ada' FROM pet LIMIT 1", "SELECT name FROM pet WHERE age = 3", 0.0),
        (
            "SELECT name FROM pet WHERE age = (SELECT max(age) FROM pet)",
            "SELECT name FROM pet ORDER BY age DESC LIMIT 1",
            1.0,
        ),
        ("SELECT 4.5 FROM pet LIMIT 1", "SELECT DISTINCT weight FROM pet WHERE weight > 4", 0.0),
        ("SELECT max(weight) FROM pet", "SELECT DISTINCT weight FROM pet WHERE weight > 4", 1.0),
        ("SELECT 1 FROM pet LIMIT 1", "SELECT EXISTS (SELECT 1 FROM pet)", 0.0),
        ("SELECT count(*) > 0 FROM pet", "SELECT EXISTS (SELECT 1 FROM pet)", 1.0),
        ("SELECT 4 FROM city LIMIT 1", "SELECT count(*) FROM city", 0.0),
        ("SELECT count(name) FROM city", "SELECT count(*) FROM city", 1.0),
        ("SELECT 'Graz' FROM city LIMIT 1", "SELECT name FROM city WHERE land = 'at'", 0.0),
        ("SELECT name FROM city WHERE land LIKE 'a%'", "SELECT name FROM city WHERE land = 'at'", 1.0),
        ("SELECT count(name) FROM pet", "SELECT count(rowid) FROM pet", 1.0),
        ("SELECT x'ff'", "SELECT x'FF'", 1.0),
        ("SELECT name FROM pets", "SELECT name FROM pet", 0.0),
        ("not SQL", "SELECT 1", 0.0),
        ("", "SELECT name FROM pet WHERE age < 0", 0.0),
        ("SELECT 1; SELECT 1", "SELECT 1", 0.0),
        (None, "SELECT 1", 0.0),
        (["SELECT 1"], "SELECT 1", 0.0),
    ],
)
async def test_queries_are_the_same_if_their_rows_are(
    judged: Callable[..., Any], answer: Any, expected: str, value: float
) -> None:
    assert await judged(answer, expected) == value


@pytest.mark.parametrize(("answer", "value"), [("SELECT 3 FROM pet LIMIT 1", 0.0), ("SELECT count(age) FROM pet", 1.0)])
async def test_a_guess_does_not_count_in_a_file_that_no_memory_holds(
    judged: Callable[..., Any], database: Path, answer: str, value: float
) -> None:
    with database.open("r+b") as file:  # 1.2 GB of pages that nothing uses, and no disk holds.
        file.seek(28)
        file.write((300_000).to_bytes(4, "big"))
        file.truncate(300_000 * 4096)
    assert await judged(answer, "SELECT count(*) FROM pet") == value


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM pet",
        "INSERT INTO pet VALUES ('Di', 1, 1.0) RETURNING name",
        "DROP TABLE pet",
        "CREATE TEMP TABLE t AS SELECT 1",
        "PRAGMA user_version = 7",
        "SELECT * FROM pragma_table_info('pet')",
        "ATTACH 'FOLDER/other.sqlite' AS other",
        "VACUUM INTO 'FOLDER/other.sqlite'",
        "BEGIN",
        "SELECT load_extension('x')",
        "SELECT zeroblob(900000000)",
    ],
)
async def test_a_query_can_only_read(database: Path, query: str) -> None:
    before = fingerprint(database.parent)
    with pytest.raises(sqlite3.Error):
        await run_query(database, query.replace("FOLDER", str(database.parent)), timeout=1.0)
    assert fingerprint(database.parent) == before


async def test_a_single_call_of_a_function_is_stopped_and_its_late_result_refused(
    judged: Callable[..., Any], database: Path
) -> None:
    with pytest.raises(sqlite3.OperationalError, match=r"interrupted: it took longer than 0\.05 seconds"):
        await run_query(database, ONE_LONG_CALL, timeout=0.05)
    assert await judged(ONE_LONG_CALL, "SELECT 0", timeout=0.5) == 0.0


async def test_a_query_with_too_many_rows_is_wrong(judged: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert await judged(LONG, "SELECT 1") == 0.0
    three = "SELECT name FROM pet"
    monkeypatch.setattr("agl_rewards.sql._MAX_ROWS", 3)
    assert await judged(three, three) == 1.0
    monkeypatch.setattr("agl_rewards.sql._MAX_ROWS", 2)
    with pytest.raises(ConfigError, match="more than 2 rows"):
        await judged(three, three)


@pytest.mark.parametrize("values", ["printf('%999999s', i)", "zeroblob(999999)", MANY])
async def test_a_query_that_would_fill_the_memory_is_wrong_and_does_not(
    judged: Callable[..., Any], values: str
) -> None:
    before = most_memory()
    assert await judged(LONG.replace("SELECT i FROM n", f"SELECT {values} FROM n"), "SELECT 1", timeout=1) == 0.0
    assert most_memory() - before < 100e6


async def test_a_row_is_bounded_before_it_comes_here(database: Path) -> None:
    before = most_memory()
    values = ", ".join(["replace(hex(zeroblob(200000)), '0', 'ab') || name"] * 400)
    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
        await run_query(database, f"SELECT {values} FROM pet", timeout=1.0)
    assert most_memory() - before < 100e6


@pytest.mark.parametrize("query", ["SELECT name FROM pet", "SELECT 'é', x'ffff', NULL"])
async def test_the_bytes_of_all_rows_are_bounded(
    judged: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    monkeypatch.setattr("agl_rewards.sql._MAX_BYTES", 120)
    assert await judged(query, query) == 1.0
    monkeypatch.setattr("agl_rewards.sql._MAX_BYTES", 40)
    assert await judged(query, "SELECT 'a' WHERE 0") == 0.0
    with pytest.raises(ConfigError, match="returned more than 40 bytes"):
        await judged(query, query)


@pytest.mark.parametrize(
    ("expected", "reason"),
    [("SELECT colour FROM pet", "no such column"), (ENDLESS, "interrupted"), ("", "not a query")],
)
async def test_an_expected_query_that_fails_is_an_error_with_the_task(
    judged: Callable[..., Any], expected: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s)Task 't1'.*'sql'.*{reason}.*Correct it"):
        await judged("SELECT 1", expected, timeout=0.05)


async def test_the_file_is_named_by_the_tasks_metadata(database: Path) -> None:
    episode = make.episode(result="SELECT 1", metadata={"result": "SELECT 1", "db": "pets"})
    template = database.parent / "{db}.sqlite"
    assert await sql_match(episode, database=template) == 1.0
    with pytest.raises(ConfigError, match=r"no metadata 'database'"):
        await sql_match(episode)
    with pytest.raises(ConfigError, match=r"there is no file .*dogs\.sqlite"):
        await sql_match(episode, database=database.parent / "dogs.sqlite")


@pytest.mark.parametrize("named", ["pets.sqlite", "./below/../pets.sqlite", "ABSOLUTE"])
async def test_a_file_named_in_the_metadata_starts_at_the_folder_of_the_template(
    database: Path, tmp_path_factory: pytest.TempPathFactory, named: str
) -> None:
    (database.parent / "below").mkdir()
    folder = tmp_path_factory.mktemp("elsewhere") if named == "ABSOLUTE" else database.parent
    metadata = {"result": "SELECT 1", "database": named.replace("ABSOLUTE", str(database))}
    rule = make.rule(kinds.REWARD, "sql_match", database=folder / "{database}")
    assert await rule(make.episode(result="SELECT 1", metadata=metadata)) == 1.0


async def test_a_database_in_wal_mode_is_read_and_not_changed(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    before = fingerprint(database.parent)
    assert (await run_query(database, "SELECT count(*) FROM pet", 5.0))[0] == [(3,)]
    assert fingerprint(database.parent) == before
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("INSERT INTO pet VALUES ('Di', 1, 1.0)")
        connection.commit()
        assert (await run_query(database, "SELECT count(*) FROM pet", 5.0))[0] == [(4,)]


async def test_a_file_name_with_special_characters_is_found(database: Path) -> None:
    odd = Path(shutil.copy(database, database.with_name("a?b#c %41.sqlite")))
    assert (await run_query(odd, "SELECT count(*) FROM pet", 1.0))[0] == [(3,)]


async def test_a_query_that_sorts_more_than_sqlite_keeps_at_hand_has_its_rows(database: Path) -> None:
    distinct = "WITH RECURSIVE n(i) AS (SELECT 1 UNION SELECT i + 1 FROM n WHERE i < 400000) SELECT count(*) FROM n"
    assert (await run_query(database, distinct, 60.0))[0] == [(400_000,)]
