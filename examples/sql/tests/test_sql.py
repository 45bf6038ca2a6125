"""Databases and questions: right, repeatable, in Spider's bands, and some never met in training; bounded queries."""

from __future__ import annotations

import json
import random
import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from make_databases import make
from make_sql import Habit, conversation, lesson, written
from spider import Difficulty, difficulty
from sql_query import describe, reading, run
from sql_questions import Question, question
from sql_schemas import DATABASES, HELD_OUT, TRAINED, Table
from sql_tasks import sql
from sql_words import NOUNS

from agl_core import kinds
from agl_core.errors import ConfigError
from agl_core.plugins import Plugins

ALL = TRAINED | HELD_OUT


def words(tables: tuple[Table, ...]) -> set[str]:
    return {word for table in tables for word in (table.name, *(column.word for column in table.columns))}


def drawn(name: str, count: int) -> list[Question]:
    with reading(DATABASES / f"{name}.sqlite") as connection:
        return [question(random.Random(f"{name}{i}"), connection, ALL[name]) for i in range(count)]


@pytest.mark.parametrize("name", ALL)
def test_the_script_makes_the_shipped_databases(name: str, tmp_path: Path) -> None:
    make(tmp_path / "again.sqlite", name, ALL[name])
    dumps = []
    for file in (tmp_path / "again.sqlite", DATABASES / f"{name}.sqlite"):
        with closing(sqlite3.connect(file)) as connection:
            dumps.append(list(connection.iterdump()))
            assert not connection.execute("PRAGMA foreign_key_check").fetchall()
            assert connection.execute("SELECT 1 FROM sqlite_master WHERE sql LIKE '%REFERENCES%'").fetchall()
    assert dumps[0] == dumps[1]


@pytest.mark.parametrize("name", ALL)
def test_a_question_is_answered_by_its_query_alone(name: str) -> None:
    with reading(DATABASES / f"{name}.sqlite") as connection:
        for q in drawn(name, 40):
            right = run(connection, q.query())
            assert right.error is None
            assert right.rows
            for habit in (Habit.FORGET, Habit.COUNT, Habit.BOTH):
                assert Counter(run(connection, written(q, habit)).rows) != Counter(right.rows), q
            # What a query names is a name of the schema, so it can be copied.
            names = {word for table in ALL[name] for word in (table.name, table.key, *(c.name for c in table.columns))}
            words = set(re.findall(r"[a-z_]+", re.sub(r"'.*?'", "", q.query())))
            assert words - {"count", "avg", "min", "max", "sum"} <= names


def test_bands_are_equally_frequent_and_what_spider_calls_them() -> None:
    questions = [q for name in ALL for q in drawn(name, 50)]
    shares = Counter(q.difficulty for q in questions)
    assert shares.keys() == set(Difficulty)
    assert min(shares.values()) > 0.18 * len(questions)


def test_evaluation_asks_other_databases_than_training() -> None:
    trained = {sql(i, seed, split="train").metadata["database"] for seed in (0, 1) for i in range(60)}
    held_out = {sql(i, 0, split="eval").metadata["database"] for i in range(60)}
    assert trained == {str(DATABASES / f"{name}.sqlite") for name in TRAINED}
    assert held_out == {str(DATABASES / f"{name}.sqlite") for name in HELD_OUT}


def test_the_warm_up_sees_none_of_the_dozen() -> None:
    """Its schemas are random, of many more words than the dozen's."""
    used = set().union(*map(words, ALL.values()))
    assert used <= set(NOUNS)
    assert len(NOUNS) >= 4 * len(used)
    shown = [show(0, index)[1]["content"] for show in (conversation, lesson) for index in range(300)]
    headers = {line for text in shown for line in text.splitlines() if line.startswith("table ")}
    for name in ALL:
        with reading(DATABASES / f"{name}.sqlite") as connection:
            assert not headers & set(describe(connection).splitlines())


EXAMPLE = Path(__file__).parents[1]
PETS = [
    ("How many pets are there?", "SELECT count(*) FROM pet"),
    (
        "Name the owners of dogs, oldest first.",
        "SELECT T1.name FROM owner AS T1 JOIN pet AS T2 ON T1.id = T2.owner WHERE T2.kind = 'dog' ORDER BY T1.age DESC",
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as Spider's archive has it, with one database."""
    entries = [{"db_id": "pets", "question": text, "query": sql, "query_toks": sql.split()} for text, sql in PETS]
    (tmp_path / "train_spider.json").write_text(json.dumps(entries))
    (tmp_path / "dev.json").write_text(json.dumps(entries[:1]))
    (tmp_path / "tables.json").write_text(json.dumps([{"db_id": "pets", "table_names_original": ["owner", "pet"]}]))
    file = tmp_path / "database" / "pets" / "pets.sqlite"
    file.parent.mkdir(parents=True)
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(
            "CREATE TABLE owner (id INTEGER PRIMARY KEY, name TEXT, age INTEGER);"
            "CREATE TABLE pet (kind TEXT, owner INTEGER REFERENCES owner (id));"
            "INSERT INTO owner VALUES (1, 'Ann', 30), (2, 'Bob', 40); INSERT INTO pet VALUES ('dog', 1), ('cat', 2);"
        )
    return tmp_path


def source(folder: Path, **settings: Any) -> Any:
    component = Plugins.load([EXAMPLE / "sql_tasks.py"]).component(kinds.TASK_SOURCE, "spider", "[tasks]")
    return component.build(component.options.model_validate({"path": folder, **settings}), folder.parent, 0)


def test_a_folder_in_spiders_format_gives_tasks(folder: Path) -> None:
    tasks_ = source(folder, split="train")
    assert tasks_.size == 2
    tasks = {task.input["question"]: task for task in (tasks_.task(i) for i in range(tasks_.size))}
    for (text, query), band in zip(PETS, (Difficulty.EASY, Difficulty.HARD), strict=True):
        task = tasks[text]
        assert task.input.keys() == {"question", "database"}
        assert task.metadata == {"sql": query, "database": task.input["database"], "difficulty": band}
    with reading(Path(tasks_.task(0).input["database"])) as connection:
        assert describe(connection) == "table owner : id name age\ntable pet : kind owner ( owner = owner.id )"
    assert source(folder, split="dev").size == 1


@pytest.mark.parametrize("missing", ["dev.json", "tables.json", "database/pets/pets.sqlite"])
def test_what_is_missing_is_named(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=missing):
        _ = source(folder, split="dev").size


@pytest.mark.parametrize(
    ("query", "band"),
    [
        ("SELECT name FROM singer", "easy"),
        ("SELECT avg(age), max(age) FROM singer WHERE country = 'France'", "medium"),
        ("SELECT a FROM t WHERE b BETWEEN 1 AND 2", "easy"),
        ("SELECT a, b FROM t WHERE c = 'x and y' ORDER BY d", "medium"),
        ("SELECT T2.name, count(*) FROM c AS T1 JOIN s AS T2 ON T1.i = T2.i GROUP BY T1.i", "medium"),
        ("SELECT name FROM s WHERE id NOT IN (SELECT id FROM c)", "hard"),
        ("SELECT a FROM t EXCEPT SELECT a FROM u WHERE b = 1", "hard"),
        ("SELECT a FROM t JOIN u ON t.i = u.i WHERE b = 1 AND c = 2 ORDER BY d", "hard"),
        ("SELECT a FROM t JOIN u ON t.i = u.i GROUP BY a ORDER BY count(*) DESC LIMIT 1", "extra"),
        ("SELECT a, b FROM t WHERE c > (SELECT avg(c) FROM t WHERE d LIKE '%x%')", "extra"),
    ],
)
def test_bands_follow_spiders_counting(query: str, band: str) -> None:
    assert difficulty(query) == difficulty(query.upper().replace("'%X%'", "'%x%'")) == band


SLOW = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("DELETE FROM ship", "not authorized"),
        ("ATTACH 'other.sqlite' AS other", "not authorized"),
        ("", "not a query"),
        ("SELECT 1; SELECT 2", "one statement"),
        (SLOW, "interrupted"),
        ("SELECT a.flag FROM ship AS a, ship AS b, ship AS c", "more than 1000 rows"),
        ("SELECT length(randomblob(1000000))", "too big"),
    ],
)
def test_a_query_reads_within_bounds(query: str, error: str) -> None:
    with reading(DATABASES / "harbours.sqlite") as connection:
        before = describe(connection)
        assert error in (run(connection, query).error or "")
        assert describe(connection) == before
