"""The tables of the SQLite store, and the statements that write them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Generic, Literal, TypeVar

from agl_core.types import Attempt, AttemptKey, Call, Feedback, Reward, Rollout, Run, ToolResult, TrainingRecord
from agl_core.types.forms import Field, fields_of

Kept = TypeVar("Kept")


@dataclass(frozen=True, eq=False)
class Table(Generic[Kept]):
    """One table: columns for what is looked up, sorted or unique, and one with the rest of the record as JSON."""

    name: str
    record: type[Kept]
    fields: tuple[str, ...]
    """The record's fields that have a column of their own, without rollout and attempt."""
    key: tuple[str, ...]
    """What its unique index is on."""
    others: tuple[str, ...] = ("body",)
    """The columns after them."""
    again: Literal["replace", "keep", "fail"] = "replace"
    """What to do with an earlier row that has the same key."""
    fills: tuple[str, ...] = ()
    """Of an earlier row that is kept: the fields that a later one fills in where they are NULL; each is JSON."""

    @property
    def of_attempts(self) -> bool:
        """Whether its rows belong to attempts: their rollout and attempt are one column, the number that these have."""
        return self.key[0] == "attempt_key"

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return (*(("attempt_key",) if self.of_attempts else ()), *self.fields, *self.fills, *self.others)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The fields that a row begins with, outside of the file."""
        return ("rollout", "attempt", *self.fields) if self.of_attempts else self.fields

    @cached_property
    def outside(self) -> tuple[Field, ...]:
        """The fields of `names`."""
        known = fields_of(self.record)  # type: ignore[arg-type]  # mypy takes no class as hashable
        return tuple(known[name] for name in self.names)

    @cached_property
    def inside(self) -> tuple[Field, ...]:
        """The fields that are in the body."""
        known = fields_of(self.record).values()  # type: ignore[arg-type]
        return tuple(field for field in known if field.name not in (*self.names, *self.fills))


ATTEMPT_KEYS = Table("attempt_keys", AttemptKey, ("rollout", "attempt"), ("rollout", "attempt"), (), again="keep")
PIECES = Table("pieces", tuple, (), ("seq",), ("seq", "data"), again="fail")
RUNS = Table("runs", Run, ("id", "restart"), ("id", "restart"))
ROLLOUTS = Table("rollouts", Rollout, ("id", "run", "group", "mode", "step", "state"), ("id",))
ATTEMPTS = Table("attempts", Attempt, ("ended",), ("attempt_key",))
CALLS = Table(
    "calls",
    Call,
    ("id", "sequence"),
    ("attempt_key", "id"),
    ("counted_trace", "pieces", "arrays", "body"),
)
TOOL_RESULTS = Table(
    "tool_results",
    ToolResult,
    ("source", "id"),
    ("attempt_key", "source", "id"),
    # What the agent's side reported first stands: anything that the agent starts may report something else later.
    # Spans around a tool's own come after it, and may know whose it is and which call it answers.
    again="keep",
    fills=("tool_call_id", "agent", "parent_span"),
)
# NULLs are never equal in a unique index, but two terminal rewards of one name are the same row.
_REWARD_KEY = ("attempt_key", "name", "source", "ifnull(call, x'')", "choice")
REWARDS = Table("rewards", Reward, ("name", "source", "call", "choice"), _REWARD_KEY)
TRAINING_RECORDS = Table(
    "training_records", TrainingRecord, ("call", "choice", "step"), ("attempt_key", "call", "choice", "step")
)
FEEDBACK = Table("feedback", Feedback, ("id",), ("attempt_key", "id"), again="keep")

RECORDS: tuple[Table[Any], ...] = (RUNS, ROLLOUTS, ATTEMPTS, CALLS, TOOL_RESULTS, REWARDS, TRAINING_RECORDS, FEEDBACK)
"""Those whose rows are records."""
TABLES: tuple[Table[Any], ...] = (ATTEMPT_KEYS, PIECES, *RECORDS)
"""In the order of writing: what others refer to comes first."""


def columns_of(table: Table[Any]) -> str:
    """Its columns in a statement, quoted: `group` is a word of SQL."""
    return ", ".join(f'"{column}"' for column in table.columns)


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
    insert = f"INSERT INTO {table.name} ({columns_of(table)}) VALUES {', '.join([row] * rows)}"
    if table.again == "fail":
        return insert
    conflict = f"ON CONFLICT ({', '.join(table.key)})"
    if table.again == "keep" and not table.fills:
        return f"{insert} {conflict} DO NOTHING"
    changes = ", ".join(
        f"{column} = ifnull({column}, excluded.{column})" if table.fills else f'"{column}" = excluded."{column}"'
        for column in table.fills or table.columns
        if column not in table.key
    )
    return f"{insert} {conflict} DO UPDATE SET {changes}"
