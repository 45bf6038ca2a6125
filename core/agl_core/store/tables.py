"""What a row of each of the SQLite store's tables is: the one description that both the file and the wire follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Generic, Literal, NamedTuple, TypeVar

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


class Column(NamedTuple):
    """One value of a row."""

    name: str
    type: str
    optional: bool
    field: Field | None = None
    """The field of the record that it holds, if it is one."""


@dataclass(frozen=True, eq=False)
class Table(Generic[Kept]):
    """One table: its columns are the record's fields, in their order, each written as its type says.

    Columns that are no fields are given with their types, with a question mark if they may be NULL.
    """

    name: str
    record: type[Kept]
    key: tuple[str, ...]
    """The columns that name a row."""
    owner: Mapping[str, str] = field(default_factory=dict)
    """Columns before the record's own."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """By field, its column where that has another name."""
    instead: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By field, the columns that stand for it where its value is taken apart."""
    index: str = ""
    """What its unique index is on, where that is not just the key's columns."""
    again: Literal["replace", "keep", "fail"] = "replace"
    """What to do with an earlier row that has the same key."""
    fills: tuple[str, ...] = ()
    """Of an earlier row that is kept: the columns that a later one fills in where they are null."""

    @property
    def of_attempts(self) -> bool:
        """Whether its rows belong to attempts: they begin with rollout and attempt, for which the file has a number."""
        return self.key[0] == "attempt_key"

    @cached_property
    def described(self) -> tuple[Column, ...]:
        found = _apart(self.owner)
        for each in fields_of(self.record).values():  # type: ignore[arg-type]
            if each.name in self.instead:
                found += _apart(self.instead[each.name])
            else:
                name = self.renamed.get(each.name, each.name)
                found.append(Column(name, str(each.kind.column), each.optional, each))
        return tuple(sorted(found, key=lambda column: column.name not in ("rollout", "attempt")))

    @cached_property
    def values(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.described)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return ("attempt_key", *self.values[2:]) if self.of_attempts else self.values


def _apart(columns: Mapping[str, str]) -> list[Column]:
    return [Column(name, type_.rstrip("?"), type_.endswith("?")) for name, type_ in columns.items()]


ATTEMPT_KEYS = Table("attempt_keys", AttemptKey, ("rollout", "attempt"), again="keep")
PIECES = Table("pieces", tuple, ("seq",), {"seq": "INTEGER", "data": "TEXT OR BLOB"}, again="fail")
RUNS = Table("runs", Run, ("id", "restart"))
ROLLOUTS = Table("rollouts", Rollout, ("id",), renamed={"group": "grp"})
ATTEMPTS = Table("attempts", Attempt, ("attempt_key",))
CALLS = Table(
    "calls",
    Call,
    ("attempt_key", "id"),
    instead={
        "request": {"request": "TEXT", "request_lists": "TEXT", "request_pieces": "BLOB"},
        "choices": {"n_choices": "INTEGER"},
        "prompt_ids": {"prompt_blocks": "BLOB?", "prompt_tail": "BLOB?"},
    },
)
CHOICES = Table(
    "choices",
    Choice,
    ("attempt_key", "call", "position"),
    {"rollout": "TEXT", "attempt": "INTEGER", "call": "TEXT", "position": "INTEGER"},
    renamed={"index": "choice"},
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
REWARDS = Table(
    "rewards",
    Reward,
    ("attempt_key", "name", "source", "call", "choice"),
    # NULLs are never equal in a unique index, but two terminal rewards of one name are the same row.
    index="attempt_key, name, source, ifnull(call, x''), choice",
)
TRAINING_RECORDS = Table("training_records", TrainingRecord, ("attempt_key", "call", "choice", "step"))
ANNOTATIONS = Table("annotations", Annotation, ("attempt_key", "id"), again="keep")

RECORDS: tuple[Table[Any], ...] = (
    *(RUNS, ROLLOUTS, ATTEMPTS, TOOL_RESULTS, REWARDS, TRAINING_RECORDS, ANNOTATIONS, CALLS),
)
"""Those whose rows are records; a call's choices have a table of their own."""
TABLES: tuple[Table[Any], ...] = (ATTEMPT_KEYS, PIECES, CHOICES, *RECORDS)
"""In the order of writing: what others refer to comes first."""


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
    if table.again == "fail":
        return insert
    conflict = f"ON CONFLICT ({table.index or ', '.join(table.key)})"
    if table.again == "keep" and not table.fills:
        return f"{insert} {conflict} DO NOTHING"
    changes = ", ".join(
        f"{column} = ifnull({column}, excluded.{column})" if table.again == "keep" else f"{column} = excluded.{column}"
        for column in table.fills or table.columns
        if column not in table.key
    )
    return f"{insert} {conflict} DO UPDATE SET {changes}"
