"""Questions about any database of `sql_schemas`, each with its query, in Spider's four bands of difficulty.

A question is drawn from a kind, a table of the schema, and values in its rows. It is kept only if its rows answer it:
the query finds something, it has one answer, and leaving a part of it out gives another.
"""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from spider import Difficulty, difficulty
from sql_query import run
from sql_schemas import Column, Table


@dataclass(frozen=True)
class Question:
    """A question and its query, in the two parts that a bad writer may get wrong."""

    text: str
    select: str
    table: str
    rest: str
    forgotten: str
    """The same part if one forgets some of it: the join if there is one, else everything."""
    lacks: str
    """The name of that part."""

    def query(self, select: str | None = None, rest: str | None = None) -> str:
        """The right query, or one with another selection or rest."""
        rest = self.rest if rest is None else rest
        return f"SELECT {select or self.select} FROM {self.table}{rest and ' ' + rest}"

    @property
    def miscounted(self) -> str:
        """The wrong selection: count instead of show, and show instead of count."""
        return "*" if self.select == COUNT else COUNT

    @property
    def difficulty(self) -> Difficulty:
        """By Spider's rules, of the right query."""
        return difficulty(self.query())


COUNT = "count(*)"
AGGREGATES = {"avg": "average", "max": "highest", "min": "lowest", "sum": "total"}


PATIENCE = 30
"""How many questions of a band are tried."""


@dataclass(frozen=True)
class Draw:
    """The choices of one question: a table, and what is asked of it."""

    rng: random.Random
    connection: sqlite3.Connection
    table: Table

    def column(self, table: Table, numbers: bool | None = None, but: Column | None = None) -> Column:
        """A column, of numbers or texts; IndexError if there is none."""
        found = list(table.columns) if numbers is None else table.of_numbers(numbers)
        return self.rng.choice([column for column in found if column is not but])

    def value(self, table: Table, column: Column) -> str:
        values = self.connection.execute(f"SELECT {column.name} FROM {table.name} ORDER BY rowid").fetchall()
        return str(self.rng.choice(values)[0])

    def say(self, *phrasings: str) -> str:
        return self.rng.choice(phrasings)

    @property
    def parent(self) -> Table:
        """The table that it refers to; IndexError if there is none."""
        return self.rng.choice([self.table.parent] if self.table.parent else [])


def compare(draw: Draw) -> Question:
    """A filter by a number."""
    by = draw.column(draw.table, numbers=True)
    shown = draw.column(draw.table, but=by)
    word, sign = draw.rng.choice((("above", ">"), ("below", "<")))
    value, t = draw.value(draw.table, by), draw.table.name
    text = draw.say(
        f"List the {shown.word} of each {t} with {by.word} {word} {value} .",
        f"Which {t} have {by.word} {word} {value} ? Show the {shown.word} .",
    )
    return Question(text, shown.name, t, f"WHERE {by.name} {sign} {value}", "", "filter")


def equal(draw: Draw) -> Question:
    """A filter by a text."""
    by = draw.column(draw.table, numbers=False)
    shown = draw.column(draw.table, but=by)
    value, t = draw.value(draw.table, by), draw.table.name
    text = draw.say(
        f"List the {shown.word} of each {t} with {by.word} '{value}' .",
        f"Which {t} have {by.word} '{value}' ? Show the {shown.word} .",
    )
    return Question(text, shown.name, t, f"WHERE {by.name} = '{value}'", "", "filter")


def count(draw: Draw) -> Question:
    """How many."""
    by = draw.column(draw.table, numbers=False)
    value, t = draw.value(draw.table, by), draw.table.name
    text = draw.say(f"How many {t} have {by.word} '{value}' ?", f"Count each {t} with {by.word} '{value}' .")
    return Question(text, COUNT, t, f"WHERE {by.name} = '{value}'", "", "filter")


def aggregate(draw: Draw) -> Question:
    """The average, highest, lowest or total of some."""
    by, of = draw.column(draw.table, numbers=False), draw.column(draw.table, numbers=True)
    function, word = draw.rng.choice(list(AGGREGATES.items()))
    value, t = draw.value(draw.table, by), draw.table.name
    text = draw.say(
        f"What is the {word} {of.word} of each {t} with {by.word} '{value}' ?",
        f"Give the {word} {of.word} of any {t} with {by.word} '{value}' .",
    )
    return Question(text, f"{function} ( {of.name} )", t, f"WHERE {by.name} = '{value}'", "", "filter")


def superlative(draw: Draw) -> Question:
    """The one with the most or least of something."""
    by = draw.column(draw.table, numbers=True)
    shown = draw.column(draw.table, but=by)
    word, end = draw.rng.choice((("highest", "DESC "), ("lowest", "")))
    t = draw.table.name
    text = draw.say(
        f"Show the {shown.word} of the {t} with the {word} {by.word} .",
        f"Which {t} has the {word} {by.word} ? Show the {shown.word} .",
    )
    return Question(text, shown.name, t, f"ORDER BY {by.name} {end}LIMIT 1", "", "order")


def sort(draw: Draw) -> Question:
    """A filter and an order."""
    by, key = draw.column(draw.table, numbers=False), draw.column(draw.table, numbers=True)
    value, t = draw.value(draw.table, by), draw.table.name
    shown = draw.column(draw.table, but=by)
    text = f"List the {shown.word} of each {t} with {by.word} '{value}' , sorted by {key.word} ."
    return Question(text, shown.name, t, f"WHERE {by.name} = '{value}' ORDER BY {key.name}", "", "filter")


def join(draw: Draw) -> Question:
    """A filter by a column of another table."""
    parent = draw.parent
    by, shown = draw.column(parent, numbers=False), draw.column(draw.table)
    value, t = draw.value(parent, by), draw.table.name
    text = draw.say(
        f"List the {shown.word} of each {t} whose {parent.name} has {by.word} '{value}' .",
        f"For the {parent.name} with {by.word} '{value}' , show the {shown.word} of each {t} .",
    )
    where = f"WHERE {by.name} = '{value}'"
    return Question(text, shown.name, t, f"JOIN {parent.name} USING ( {parent.key} ) {where}", where, "join")


def join_and_sort(draw: Draw) -> Question:
    """The same in an order."""
    asked, key = join(draw), draw.column(draw.table, numbers=True)
    order = f"ORDER BY {key.name}"
    text = f"{asked.text.removesuffix(' .')} , sorted by {key.word} ."
    return Question(text, asked.select, asked.table, f"{asked.rest} {order}", f"{asked.forgotten} {order}", "join")


def above_average(draw: Draw) -> Question:
    """A query in a query."""
    by = draw.column(draw.table, numbers=True)
    shown = draw.column(draw.table, but=by)
    word, sign = draw.rng.choice((("above", ">"), ("below", "<")))
    t = draw.table.name
    text = draw.say(
        f"List the {shown.word} of each {t} with {by.word} {word} average .",
        f"Which {t} have {by.word} {word} average ? Show the {shown.word} .",
    )
    return Question(text, shown.name, t, f"WHERE {by.name} {sign} ( SELECT avg ( {by.name} ) FROM {t} )", "", "filter")


def join_and_superlative(draw: Draw) -> Question:
    """The one with the most or least of something, among those that a filter of another table finds."""
    parent, best = draw.parent, superlative(draw)
    by, t = draw.column(parent, numbers=False), draw.table.name
    value = draw.value(parent, by)
    text = f"For the {parent.name} with {by.word} '{value}' , {best.text[0].lower()}{best.text[1:]}"
    rest = f"WHERE {by.name} = '{value}' {best.rest}"
    return Question(text, best.select, t, f"JOIN {parent.name} USING ( {parent.key} ) {rest}", rest, "join")


def most(draw: Draw) -> Question:
    """Groups of joined rows."""
    parent = draw.parent
    shown, t = draw.column(parent), draw.table.name
    text = draw.say(
        f"Show the {shown.word} of the {parent.name} with the most {t} .",
        f"Which {parent.name} has the most {t} ? Show the {shown.word} .",
    )
    rest = f"GROUP BY {parent.key} ORDER BY count(*) DESC LIMIT 1"
    return Question(text, shown.name, parent.name, f"JOIN {t} USING ( {parent.key} ) {rest}", rest, "join")


KINDS: dict[Difficulty, tuple[Callable[[Draw], Question], ...]] = {
    Difficulty.EASY: (compare, equal, count, aggregate),
    Difficulty.MEDIUM: (superlative, sort, join),
    Difficulty.HARD: (above_average, join_and_sort),
    Difficulty.EXTRA: (most, join_and_superlative),
}


def question(rng: random.Random, connection: sqlite3.Connection, tables: tuple[Table, ...]) -> Question:
    """Draw until a question is answered by the rows: each band equally often, as far as the rows allow."""
    while True:
        kinds = KINDS[rng.choice(list(KINDS))]
        for _ in range(PATIENCE):
            try:
                asked = rng.choice(kinds)(Draw(rng, connection, rng.choice(tables)))
            except IndexError:  # The table has no such column, or no parent.
                continue
            if answered(connection, asked):
                return asked


def answered(connection: sqlite3.Connection, asked: Question) -> bool:
    """True if the rows tell the right query from the wrong ones."""
    right = run(connection, asked.query()).rows
    if not right or right == ((None,),) or right == ((0,),):
        return False
    wrong = asked.query(rest=asked.forgotten), asked.query(asked.miscounted)
    if any(Counter(run(connection, query).rows) == Counter(right) for query in wrong):
        return False
    return not asked.rest.endswith("LIMIT 1") or not _tied(connection, asked)


def _tied(connection: sqlite3.Connection, asked: Question) -> bool:
    """True if the first two rows have the same place in the order, or there is but one."""
    order = asked.rest.partition("ORDER BY ")[2].split()[0]
    first = run(connection, asked.query(order, f"{asked.rest.removesuffix('1')}2")).rows
    return len({*first}) < 2
