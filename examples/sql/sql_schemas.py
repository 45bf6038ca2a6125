"""Schemas and their rows: the dozen databases of this example, and random ones that the policy is warmed up on.

A table has a key, at most one reference to another table (under the name of that table's key), and columns of numbers
or texts. No two columns of a database have one name, apart from keys.
"""

from __future__ import annotations

import random
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from sql_words import KEYS, NOUNS, SUFFIXES, UNITS, VALUES

DATABASES = Path(__file__).parent / "databases"
NUMBER = "number"
LARGEST_NUMBER = 99
DIFFERENT_TEXTS = 6
"""In a column: few, so that a filter finds several rows."""


@dataclass(frozen=True)
class Column:
    """A column that questions may be about."""

    word: str
    name: str
    """The column's name in the schema, for instance with a unit: `weight_kg`."""
    kind: str
    """"number", or which texts it holds: a key of `VALUES`."""


@dataclass(frozen=True)
class Table:
    name: str
    key: str
    parent: Table | None
    columns: tuple[Column, ...]

    def of_numbers(self, numbers: bool) -> list[Column]:
        """The columns of numbers, or those of texts."""
        return [column for column in self.columns if (column.kind == NUMBER) is numbers]


def schema(key: str, text: str) -> tuple[Table, ...]:
    """The tables that a text describes, one a line: `song < singer: title/name@kind, length/sec#`.

    `#` marks numbers, `@kind` texts; what follows the slash is appended to the name, but not said in questions.
    """
    tables: dict[str, Table] = {}
    for line in text.strip().splitlines():
        head, _, columns = line.partition(":")
        name, _, parent = (part.strip() for part in head.partition("<"))
        made = tuple(_column(each.strip()) for each in columns.split(","))
        tables[name] = Table(name, f"{name}_{key}", tables[parent] if parent else None, made)
    return tuple(tables.values())


def _column(text: str) -> Column:
    text, _, kind = text.partition("@")
    word, _, suffix = text.rstrip("#").partition("/")
    return Column(word, f"{word}_{suffix}" if suffix else word, kind or NUMBER)


TRAINED = {
    "concerts": schema(
        "id",
        """
        singer: name@person, country@place, age#
        song < singer: title@kind, length/sec#, rank#
        """,
    ),
    "flights": schema(
        "no",
        """
        airline: brand@kind, home@place
        plane < airline: model@colour, seat#, speed#
        """,
    ),
    "shops": schema(
        "id",
        """
        store: city@place, staff#
        product < store: label@kind, price/usd#, colour@colour
        """,
    ),
    "clinics": schema(
        "ref",
        """
        doctor: name@person, salary#
        patient < doctor: origin@place, weight#, height#
        """,
    ),
    "schools": schema(
        "id",
        """
        teacher: name@person, subject@kind, income#
        course < teacher: title@kind, hour#
        pupil < course: town@place, score#
        """,
    ),
    "films": schema(
        "key",
        """
        director: name@person, nation@place
        film < director: genre@kind, budget#, length#
        """,
    ),
    "farms": schema(
        "no",
        """
        farm: region@place, area#
        animal < farm: breed@kind, weight#, age#
        crop < farm: grain@colour, harvest/kg#
        """,
    ),
    "banks": schema(
        "ref",
        """
        branch: city@place, budget#
        account < branch: owner@person, balance#, type/code@kind
        """,
    ),
}

HELD_OUT = {
    "harbours": schema(
        "id",
        """
        harbour: country@place, depth#
        ship < harbour: captain@person, length/cm#, flag@colour
        """,
    ),
    "museums": schema(
        "key",
        """
        museum: town@place, visitor#
        picture < museum: artist@person, height#, price#
        """,
    ),
    "leagues": schema(
        "no",
        """
        team: coach@person, budget#
        player < team: nation@place, goal#, wage/net#
        stadium < team: city@place, seat#
        """,
    ),
    "vineyards": schema(
        "ref",
        """
        vineyard: owner@person, hill@place, area#
        wine < vineyard: grape@colour, year#, price#
        """,
    ),
}
"""The databases of evaluation, which neither training nor the warm-up sees."""


def random_schema(rng: random.Random) -> tuple[Table, ...]:
    """Two or three tables of random words."""
    words = iter(rng.sample(NOUNS, 15))
    key = rng.choice(KEYS)
    tables: list[Table] = []
    for _ in range(rng.choice((2, 2, 2, 3))):
        name = next(words)
        kinds = [NUMBER, rng.choice(list(VALUES))]
        if rng.random() < 0.6:
            kinds.append(rng.choice((NUMBER, rng.choice(list(VALUES)))))
        rng.shuffle(kinds)
        columns = tuple(_random_column(rng, next(words), kind) for kind in kinds)
        tables.append(Table(name, f"{name}_{key}", rng.choice(tables) if tables else None, columns))
    return tuple(tables)


def _random_column(rng: random.Random, word: str, kind: str) -> Column:
    suffixes = UNITS if kind == NUMBER else SUFFIXES
    return Column(word, f"{word}_{rng.choice(suffixes)}" if rng.random() < 0.5 else word, kind)


def fill(connection: sqlite3.Connection, tables: tuple[Table, ...], rng: random.Random, rows: tuple[int, int]) -> None:
    """Make the tables, each with so many rows as `rows` allows."""
    sizes: dict[str, int] = {}
    for table in tables:
        parts = [f"{table.key} INTEGER PRIMARY KEY"]
        if table.parent:
            parts.append(f"{table.parent.key} INTEGER REFERENCES {table.parent.name} ({table.parent.key})")
        parts += [f"{column.name} {'INTEGER' if column.kind == NUMBER else 'TEXT'}" for column in table.columns]
        connection.execute(f"CREATE TABLE {table.name} ({', '.join(parts)})")
        size = sizes[table.name] = rng.randint(*rows)
        texts = {column: rng.sample(VALUES[column.kind], DIFFERENT_TEXTS) for column in table.of_numbers(False)}
        made = []
        for number in range(1, size + 1):
            row: list[int | str] = [number]
            if table.parent:
                row.append(rng.randint(1, sizes[table.parent.name]))
            for column in table.columns:
                row.append(rng.randint(1, LARGEST_NUMBER) if column.kind == NUMBER else rng.choice(texts[column]))
            made.append(row)
        marks = ", ".join("?" * len(parts))
        connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", made)
    connection.commit()
