"""The example's two task sources, as a plugin: `source = "sql"`, the dozen databases, and `source = "spider"`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import spider
from sql_query import reading
from sql_questions import question
from sql_schemas import DATABASES, HELD_OUT, TRAINED

import agl_core
from agl_core.errors import ConfigError
from agl_core.types import Task


@agl_core.endless_task_source(held_out=200)
def sql(index: int, seed: int, *, split: Literal["train", "eval"]) -> Task:
    """Questions about a dozen small databases; those of `eval` are about four that training never sees."""
    databases = TRAINED if split == "train" else HELD_OUT
    rng = random.Random(f"{split}/{seed}/{index}")
    name = rng.choice(list(databases))
    file = DATABASES / f"{name}.sqlite"
    with reading(file) as connection:
        asked = question(rng, connection, databases[name])
    return _task(f"{split}-{index}", split, asked.text, asked.query(), file, asked.difficulty)


@agl_core.task_source(name="spider")
def spider_tasks(
    *,
    path: Path,
    split: Literal["train", "dev"],
    difficulty: tuple[spider.Difficulty, ...] = tuple(spider.Difficulty),
) -> Iterator[Task]:
    """Spider (arXiv 1809.08887), from a local folder in its own format.

    The questions of these bands come in a fixed random order, so that the first ones are of many databases.
    """
    try:
        found = spider.questions(path, split)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"[tasks] source = 'spider': {error}") from error
    found = [each for each in found if each.difficulty in difficulty]
    random.Random(0).shuffle(found)
    for index, asked in enumerate(found):
        yield _task(f"{split}-{index}", split, asked.question, asked.query, asked.database, asked.difficulty)


def _task(name: str, split: str, text: str, query: str, file: Path, difficulty: spider.Difficulty) -> Task:
    return Task(
        id=name,
        input={"question": text, "database": str(file)},
        split=split,
        metadata={"sql": query, "database": str(file), "difficulty": str(difficulty)},
    )
