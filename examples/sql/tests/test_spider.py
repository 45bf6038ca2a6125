"""Spider's own format and its bands of difficulty."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from spider import Difficulty, difficulty
from sql_query import describe, reading

from agl_core import kinds
from agl_core.errors import ConfigError
from agl_core.plugins import Plugins

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
    made = source(folder, split="train")
    assert made.size == 2
    tasks = {task.input["question"]: task for task in (made.task(i) for i in range(made.size))}
    for (text, sql), band in zip(PETS, (Difficulty.EASY, Difficulty.HARD), strict=True):
        task = tasks[text]
        assert task.input.keys() == {"question", "database"}
        assert task.metadata == {"sql": sql, "database": task.input["database"], "difficulty": band}
    with reading(Path(made.task(0).input["database"])) as connection:
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
