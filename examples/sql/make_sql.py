"""Demonstrations for the tiny policy: a writer that forgets, a rewriter that repeats, a fair checker.

Every demonstration is about a random schema, so that names have to be copied from the prompt. The wrong habits are
*concentrated*, so that they are also the likeliest: the writer mostly leaves out the filter or the join, or counts
instead of showing; the rewriter mostly repeats the query that it should correct.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from recipes import Demonstrations, Message, Recipe, Shape, opened, says
from sql_prompts import CHECK, REWRITE, WRITE, State, to_checker, to_rewriter, to_writer
from sql_query import describe, run
from sql_questions import Question, question
from sql_schemas import fill, random_schema

ROWS = (8, 14)
AGENTS = {"writer": 0.55, "checker": 0.15, "rewriter": 0.3}
"""Who is demonstrated how often."""


class Habit(StrEnum):
    """The possible faults of a query."""

    RIGHT = "right"
    FORGET = "without its join, or else with nothing after the table"
    COUNT = "count(*) where something is to be shown, * where it is to be counted"
    BOTH = "both of it"
    REPEAT = "the query that is to be corrected"


@dataclass(frozen=True)
class Shares:
    """How often each habit is shown."""

    writer: Mapping[Habit, float]
    rewriter: Mapping[Habit, float]
    checker: float
    """How often it is right."""


MIXED = Shares(
    writer={Habit.RIGHT: 0.08, Habit.FORGET: 0.5, Habit.COUNT: 0.27, Habit.BOTH: 0.15},
    rewriter={Habit.RIGHT: 0.05, Habit.FORGET: 0.1, Habit.COUNT: 0.1, Habit.REPEAT: 0.75},
    checker=0.9,
)
FLAWLESS = Shares(writer={Habit.RIGHT: 1}, rewriter={Habit.RIGHT: 1}, checker=1)
_TO_CORRECT = {Habit.RIGHT: 0.1, Habit.FORGET: 0.4, Habit.COUNT: 0.3, Habit.BOTH: 0.2}
_TO_CHECK = {Habit.RIGHT: 0.4, Habit.FORGET: 0.25, Habit.COUNT: 0.2, Habit.BOTH: 0.15}


def conversation(seed: int, index: int) -> list[Message]:
    """One call of one of the three, with a reply of mixed and mostly wrong habits."""
    return demonstrated(f"demonstration/{seed}/{index}", MIXED)


def lesson(seed: int, index: int) -> list[Message]:
    """The same of three that make no mistake."""
    return demonstrated(f"lesson/{seed}/{index}", FLAWLESS)


def demonstrated(name: str, shares: Shares) -> list[Message]:
    """The demonstration of a name; the same for the same arguments, always."""
    rng = random.Random(name)
    with closing(sqlite3.connect(":memory:")) as connection:
        tables = random_schema(rng)
        fill(connection, tables, rng, ROWS)
        task = question(rng, connection, tables)
        agent = drawn(rng, AGENTS)
        before = drawn(rng, _TO_CHECK if agent == "checker" else _TO_CORRECT)
        query = written(task, before)
        remark = verdict(rng, task, before, 0.95)
        state = State(
            schema=describe(connection),
            question=task.text,
            query=query,
            outcome=str(run(connection, query)),
            remark="wrong columns" if remark == "ok" else remark,
        )
    if agent == "writer":
        return [*opened(WRITE, to_writer(state)), says(written(task, drawn(rng, shares.writer)))]
    if agent == "checker":
        return [*opened(CHECK, to_checker(state)), says(verdict(rng, task, before, shares.checker))]
    habit = drawn(rng, shares.rewriter)
    rewritten = query if habit is Habit.REPEAT else written(task, habit)
    return [*opened(REWRITE, to_rewriter(state)), says(rewritten)]


def drawn(rng: random.Random, shares: Mapping[Any, float]) -> Any:
    return rng.choices(list(shares), list(shares.values()))[0]


def written(task: Question, habit: Habit) -> str:
    select = task.miscounted if habit in (Habit.COUNT, Habit.BOTH) else task.select
    rest = task.forgotten if habit in (Habit.FORGET, Habit.BOTH) else task.rest
    return task.query(select, rest)


def verdict(rng: random.Random, task: Question, habit: Habit, share: float) -> str:
    """The checker's remark on such a query: with this share the truth, else the opposite."""
    if (habit is Habit.RIGHT) is (rng.random() < share):
        return "ok"
    return f"{task.lacks} is missing" if habit in (Habit.FORGET, Habit.BOTH) else "wrong columns"


RECIPE = Recipe(
    Demonstrations(conversation, [], lesson, phrases=(WRITE, CHECK, REWRITE)),
    Shape(vocabulary=1280, hidden=128, layers=3, heads=4, kv_heads=2, initializer_range=0.088),
    steps=2950,
    batch=32,
    learning_rate=2.5e-3,
    reading=0.68,
)
