"""The example's two task sources, as a plugin: `source = "sql"`, the dozen databases, and `source = "spider"`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import spider
from pydantic import BaseModel, ConfigDict, Field
from sql_query import reading
from sql_questions import question
from sql_schemas import DATABASES, HELD_OUT, TRAINED

import agl_core
from agl_core.errors import ConfigError
from agl_core.registering import RegisterTaskSource
from agl_core.types import Task

HELD_OUT_SIZE = 200


class SqlOptions(BaseModel):
    """What `[tasks.…]` may say beside `source = "sql"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    split: Literal["train", "eval"] = Field(description="eval: four databases that training never sees.")


@dataclass(frozen=True)
class SqlTasks:
    """Questions about the databases of one split."""

    split: Literal["train", "eval"]
    seed: int

    @property
    def size(self) -> int | None:
        """Training's questions have no end; those of evaluation are the same in every run."""
        return None if self.split == "train" else HELD_OUT_SIZE

    def task(self, index: int) -> Task:
        """The question at this index; its query is metadata, which the agent does not see."""
        databases = TRAINED if self.split == "train" else HELD_OUT
        rng = random.Random(f"{self.split}/{self.seed if self.split == 'train' else 0}/{index}")
        name = rng.choice(list(databases))
        file = DATABASES / f"{name}.sqlite"
        with reading(file) as connection:
            asked = question(rng, connection, databases[name])
        return _task(f"{self.split}-{index}", self.split, asked.text, asked.query(), file, asked.difficulty)


class SpiderOptions(BaseModel):
    """What `[tasks.…]` may say beside `source = "spider"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path = Field(description="Spider's folder, relative to the configuration.")
    split: Literal["train", "dev"] = Field(description="train_spider.json or dev.json.")
    difficulty: tuple[spider.Difficulty, ...] = Field(tuple(spider.Difficulty), description="Only these bands.")


@dataclass(frozen=True)
class SpiderTasks:
    """Spider's own questions, in a fixed random order, so that the first ones are of many databases."""

    options: SpiderOptions
    folder: Path

    @cached_property
    def asked(self) -> list[spider.Asked]:
        """The questions of the chosen bands."""
        try:
            found = spider.questions(self.folder / self.options.path, self.options.split)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"[tasks] source = 'spider': {error}") from error
        found = [each for each in found if each.difficulty in self.options.difficulty]
        random.Random(0).shuffle(found)
        return found

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.asked)

    def task(self, index: int) -> Task:
        """The question at this index; its query is metadata, which the agent does not see."""
        asked = self.asked[index]
        name = f"{self.options.split}-{index}"
        return _task(name, self.options.split, asked.question, asked.query, asked.database, asked.difficulty)


def _task(name: str, split: str, text: str, query: str, file: Path, difficulty: spider.Difficulty) -> Task:
    return Task(
        id=name,
        input={"question": text, "database": str(file)},
        split=split,
        metadata={"sql": query, "database": str(file), "difficulty": str(difficulty)},
    )


def _sql(options: SqlOptions, folder: Path, seed: int) -> SqlTasks:
    """Questions about a dozen small databases, made as they are asked for."""
    return SqlTasks(options.split, seed)


def _spider(options: SpiderOptions, folder: Path, seed: int) -> SpiderTasks:
    """Spider (arXiv 1809.08887), from a local folder in its own format."""
    return SpiderTasks(options, folder)


@agl_core.hookimpl
def register_task_sources(register: RegisterTaskSource) -> None:
    register("sql", _sql, options=SqlOptions)
    register("spider", _spider, options=SpiderOptions)
