"""Databases and questions: right, repeatable, in four bands, and with databases that training can never meet."""

from __future__ import annotations

import random
import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from make_databases import make
from make_sql import Habit, conversation, lesson, written
from spider import Difficulty
from sql_query import describe, reading, run
from sql_questions import Question, question
from sql_schemas import DATABASES, HELD_OUT, TRAINED, Table
from sql_tasks import sql
from sql_words import NOUNS

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
        for asked in drawn(name, 40):
            right = run(connection, asked.query())
            assert right.error is None
            assert right.rows
            for habit in (Habit.FORGET, Habit.COUNT, Habit.BOTH):
                assert Counter(run(connection, written(asked, habit)).rows) != Counter(right.rows), asked
            # What a query names is a name of the schema, so it can be copied.
            names = {each for table in ALL[name] for each in (table.name, table.key, *(c.name for c in table.columns))}
            said = set(re.findall(r"[a-z_]+", re.sub(r"'.*?'", "", asked.query())))
            assert said - {"count", "avg", "min", "max", "sum"} <= names


def test_bands_are_equally_frequent_and_what_spider_calls_them() -> None:
    asked = [each for name in ALL for each in drawn(name, 50)]
    shares = Counter(each.difficulty for each in asked)
    assert shares.keys() == set(Difficulty)
    assert min(shares.values()) > 0.18 * len(asked)


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
