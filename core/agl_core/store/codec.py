"""Records as rows of the tables in `tables`, and back, exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

from agl_core.errors import StoreRefusedError
from agl_core.store.interface import Record
from agl_core.store.pieces import Data, Pieces, join_request, join_tokens
from agl_core.store.tables import ATTEMPT_KEYS, CALLS, CHOICES, RECORDS, Table
from agl_core.types import Call, Choice
from agl_core.types.forms import fields_of

Kept = TypeVar("Kept")
Row: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = dict[Table[Any], list[Row]]
"""What one `put` writes, by table."""

_TABLES: Mapping[type, Table[Any]] = {table.record: table for table in RECORDS}
_PROMPT_IDS = fields_of(Call)["prompt_ids"].form


def encode(records: Iterable[Record], pieces: Pieces) -> Rows:
    """The rows of these records, without their pieces. StoreRefusedError names a record that cannot be stored."""
    rows: Rows = {}
    for record in records:
        table = _TABLES.get(type(record))
        if table is None:
            raise StoreRefusedError(f"The store keeps records (Run … TrainingRecord), not {type(record).__name__}.")
        try:
            row = _dump(table, record)
            if "\0" in row[0]:  # SQLite looks rollouts up with its JSON functions, which end a text there
                raise ValueError(f"the id {row[0]!r} contains a NUL character; leave it out")
            if isinstance(record, Call):
                row += len(record.choices), *pieces.split_request(record.request)
                row += (None, None) if record.prompt_ids is None else pieces.split_tokens(_dumped_prompt(record))
                of_choices = [(*row[:3], n, *_dump(CHOICES, choice)) for n, choice in enumerate(record.choices)]
                rows.setdefault(CHOICES, []).extend(of_choices)
        except (AttributeError, TypeError, ValueError) as error:
            raise StoreRefusedError(f"{name_of(record)} cannot be stored: {error}.") from error
        if table.of_attempts:
            rows.setdefault(ATTEMPT_KEYS, []).append(row[:2])
        rows.setdefault(table, []).append(row)
    return rows


def name_of(record: Record) -> str:
    """The record's kind and key, for messages."""
    fields = ("rollout", "attempt", "id", "name", "call", "choice", "step")
    known = [f"{field} {getattr(record, field)!r}" for field in fields if hasattr(record, field)]
    return f"{type(record).__name__} ({', '.join(known)})"


def decode(table: Table[Kept], rows: Iterable[Row]) -> list[Kept]:
    """The records of these rows, which have the columns of `table`. Calls need `decode_calls`."""
    return [table.record(**_load(table, row)) for row in rows]


def decode_calls(rows: Iterable[Row], choices: Iterable[Row], pieces: Mapping[int, Data]) -> list[Call]:
    """Rows of `calls`; rows of `choices` by position; the pieces that they refer to."""
    of_call: dict[tuple[str, int, str], list[Choice]] = {}
    for row in choices:
        of_call.setdefault(row[:3], []).append(Choice(**_load(CHOICES, row)))
    calls = []
    for row in rows:
        n_choices, rest, lengths, numbers, blocks, tail = row[-len(CALLS.after) :]
        call = Call(
            **_load(CALLS, row),
            request=join_request(rest, lengths, numbers, pieces),
            # Further choices are left from a call with the same key that this one replaced.
            choices=tuple(of_call.get(row[:3], ())[:n_choices]),
            prompt_ids=None if blocks is None else _PROMPT_IDS.load(join_tokens(blocks, tail, pieces)),
        )
        calls.append(call)
    return calls


def _dumped_prompt(call: Call) -> bytes:
    try:
        dumped: bytes = _PROMPT_IDS.dump(call.prompt_ids)
    except ValueError as error:
        raise ValueError(f"prompt_ids: {error}") from error
    return dumped


def _dump(table: Table[Any], record: Any) -> Row:
    """The values of the fields that have a column. ValueError names a field that cannot be stored."""
    fields, values = _dumping(table)
    try:
        pairs = zip(fields, values(record), strict=True)
        return tuple([None if value is None and optional else dump(value) for (dump, optional), value in pairs])
    except (AttributeError, TypeError, ValueError):
        for name, form, optional, _ in table.fields:
            value = getattr(record, name)
            try:
                _ = None if value is None and optional else form.dump(value)
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(f"{name}: {error}") from error
        raise


@cache
def _dumping(table: Table[Any]) -> tuple[list[tuple[Any, bool]], attrgetter[Any]]:
    fields = [(field.form.dump, field.optional) for field in table.fields]
    return fields, attrgetter(*(field.name for field in table.fields))


def _load(table: Table[Any], row: Row) -> dict[str, Any]:
    """The fields that have a column, by name."""
    pairs = zip(_loading(table), row[len(table.before) :], strict=False)  # `after` is left over
    return {name: value if value is None else load(value) for (name, load), value in pairs}


@cache
def _loading(table: Table[Any]) -> list[tuple[str, Any]]:
    return [(field.name, field.form.load) for field in table.fields]
