"""The tables of the SQLite store's file: one description, which the file, the statements and the codec follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Generic, Literal, TypeVar

from agl_core.types import (
    Annotation,
    Attempt,
    AttemptKey,
    Call,
    Choice,
    Reward,
    Rollout,
    Run,
    ToolResult,
    TrainingRecord,
)
from agl_core.types.forms import Field, fields_of

Kept = TypeVar("Kept")

APPLICATION_ID = 0x61676C00
"""Marks a file as agl's (`agl` in ASCII), so that another program's database is never written to."""
VERSION = 12
"""Grows with each change of the tables: a file of another version is refused."""
_KEYWORDS = {"group": '"group"', "index": '"index"'}
"""SQL's own words, quoted."""


@dataclass(frozen=True, eq=False)
class Table(Generic[Kept]):
    """One table. Its columns are those `before`, the record's fields as their types say, and those `after`.

    Columns that are no fields are given with their SQL types.
    """

    name: str
    record: type[Kept]
    key: tuple[str, ...]
    """The columns, or expressions, that name a row."""
    before: Mapping[str, str] = field(default_factory=dict)
    after: Mapping[str, str] = field(default_factory=dict)
    apart: tuple[str, ...] = ()
    """Fields whose values are taken apart: they have no column."""
    indexes: tuple[str, ...] = ()
    """What further indexes are on."""
    again: Literal["replace", "keep"] = "replace"
    """What to do with an earlier row that has the same key."""
    fills: tuple[str, ...] = ()
    """Of an earlier row that is kept: the columns that a later one fills in where they are null."""

    @property
    def of_attempts(self) -> bool:
        """Whether its rows belong to attempts: they begin with rollout and attempt, for which the file has a number."""
        return self.key[0] == "attempt_key"

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The fields that have a column, rollout and attempt first."""
        known = [each for each in fields_of(self.record).values() if each.name not in self.apart]  # type: ignore[arg-type]
        return tuple(sorted(known, key=lambda each: each.name not in ("rollout", "attempt")))

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(definition.split()[0] for definition in self._definitions)

    @cached_property
    def _definitions(self) -> list[str]:
        fields = [
            f"{_KEYWORDS.get(name, name)} {form.column}{'' if optional else ' NOT NULL'}"
            for name, form, optional, _ in self.fields
        ]
        apart = [[f"{name} {type_}" for name, type_ in columns.items()] for columns in (self.before, self.after)]
        columns = [*apart[0], *fields, *apart[1]]
        return ["attempt_key INTEGER NOT NULL", *columns[2:]] if self.of_attempts else columns

    def create(self) -> list[str]:
        """The statements that make it."""
        table = f"CREATE TABLE {self.name} (seq INTEGER PRIMARY KEY, {', '.join(self._definitions)})"
        key = f"CREATE UNIQUE INDEX {self.name}_key ON {self.name} ({', '.join(self.key)})"
        indexes = (f"CREATE INDEX {self.name}_{n} ON {self.name} {on}" for n, on in enumerate(self.indexes))
        return [table, key, *indexes]


# Rollout ids are random. An index that starts with them makes every row written touch a page of its own, and
# writing gets slower as the file grows; so they stand in one small index, and the tables with many rows are
# keyed by the number of the attempt, which only grows.
ATTEMPT_KEYS = Table("attempt_keys", AttemptKey, ("rollout", "attempt"), again="keep")
RUNS = Table("runs", Run, ("id", "restart"))
ROLLOUTS = Table("rollouts", Rollout, ("id",), indexes=("(step)", '("group")', "(state)"))
ATTEMPTS = Table("attempts", Attempt, ("attempt_key",))
CALLS = Table(
    "calls",
    Call,
    ("attempt_key", "id"),
    apart=("request", "choices", "prompt_ids"),
    after={
        "n_choices": "INTEGER NOT NULL",
        # As `pieces.Pieces` splits them.
        "request": "TEXT NOT NULL",
        "request_lists": "TEXT NOT NULL",
        "request_pieces": "BLOB NOT NULL",
        "prompt_blocks": "BLOB",
        "prompt_tail": "BLOB",
    },
)
CHOICES = Table(
    "choices",
    Choice,
    ("attempt_key", "call", "position"),
    {"rollout": "TEXT", "attempt": "INTEGER", "call": "TEXT NOT NULL", "position": "INTEGER NOT NULL"},
)
TOOL_RESULTS = Table(
    "tool_results",
    ToolResult,
    ("attempt_key", "source", "id"),
    # What the agent's side reported first stands: anything that the agent starts may report something else later.
    # Spans around a tool's own come after it, and may know whose it is and which call it answers.
    again="keep",
    fills=("tool_call_id", "agent", "parent_span"),
)
# NULLs are never equal in a unique index, but two terminal rewards of one name are the same row.
REWARDS = Table("rewards", Reward, ("attempt_key", "name", "source", "ifnull(call, x'')", "choice"))
TRAINING_RECORDS = Table("training_records", TrainingRecord, ("attempt_key", "call", "choice", "step"))
ANNOTATIONS = Table("annotations", Annotation, ("attempt_key", "id"), again="keep")

RECORDS: tuple[Table[Any], ...] = (
    *(RUNS, ROLLOUTS, ATTEMPTS, TOOL_RESULTS, REWARDS, TRAINING_RECORDS, ANNOTATIONS, CALLS),
)
"""Those whose rows are records; a call's choices have a table of their own."""
TABLES: tuple[Table[Any], ...] = (ATTEMPT_KEYS, CHOICES, *RECORDS)
"""In the order of writing: what others refer to comes first."""

SCHEMA = (
    "CREATE TABLE pieces (seq INTEGER PRIMARY KEY, data NOT NULL)",  # JSON text, or int32 tokens
    # The ids of rollouts that were removed, and must not come back.
    "CREATE TABLE erased (id TEXT PRIMARY KEY, time REAL NOT NULL) WITHOUT ROWID",
    *(statement for table in TABLES for statement in table.create()),
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)
"""The statements that make a file."""


@cache
def insertion(table: Table[Any], rows: int) -> str:
    """The statement that writes `rows` rows at once.

    Many rows in one statement, because sqlite3 gives up the interpreter lock once per statement: row by row,
    a busy event loop would make the writer wait for the lock at every row.
    """
    values = ["?"] * len(table.columns)
    if table.of_attempts:
        values[0] = "(SELECT seq FROM attempt_keys WHERE rollout = ? AND attempt = ?)"
    row = f"({', '.join(values)})"
    insert = f"INSERT INTO {table.name} ({', '.join(table.columns)}) VALUES {', '.join([row] * rows)}"
    conflict = f"{insert} ON CONFLICT ({', '.join(table.key)})"
    if table.again == "keep" and not table.fills:
        return f"{conflict} DO NOTHING"
    changes = ", ".join(
        f"{column} = ifnull({column}, excluded.{column})" if table.again == "keep" else f"{column} = excluded.{column}"
        for column in table.fills or table.columns
        if column not in table.key
    )
    return f"{conflict} DO UPDATE SET {changes}"
