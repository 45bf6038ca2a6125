"""Records as rows of the tables in `tables`, and back, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeAlias, TypeVar

from agl_core.errors import StoreRefusedError
from agl_core.store.interface import Record
from agl_core.store.pieces import Data, Pieces, join_request, join_tokens
from agl_core.store.tables import ATTEMPT_KEYS, CALLS, CHOICES, RECORDS, Table
from agl_core.types import Call, Choice
from agl_core.types.forms import Field, as_it_is, fields_of

Kept = TypeVar("Kept")
Row: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = dict[Table[Any], list[Row]]
"""What one `put` writes, by table."""

_TABLES: Mapping[type, Table[Any]] = {table.record: table for table in RECORDS}
_REQUEST = slice(CALLS.values.index("request"), CALLS.values.index("n_choices") + 1)
_PROMPT = slice(CALLS.values.index("prompt_blocks"), CALLS.values.index("prompt_tail") + 1)
_PROMPT_IDS = fields_of(Call)["prompt_ids"].kind


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
            if table.of_attempts:
                rows.setdefault(ATTEMPT_KEYS, []).append((row[0], row[1]))
            if isinstance(record, Call):
                _add_parts(record, row, rows, pieces)
        except (AttributeError, TypeError, ValueError) as error:
            raise StoreRefusedError(f"{name_of(record)} cannot be stored: {error}.") from error
        rows.setdefault(table, []).append(tuple(row))
    return rows


def name_of(record: Record) -> str:
    """The record's kind and key, for messages."""
    fields = ("rollout", "attempt", "id", "name", "call", "choice", "step")
    known = [f"{field} {getattr(record, field)!r}" for field in fields if hasattr(record, field)]
    return f"{type(record).__name__} ({', '.join(known)})"


def decode(table: Table[Kept], rows: Iterable[Row]) -> list[Kept]:
    """The records of these rows, whose values are as in `tables`. Calls need `decode_calls`."""
    return list(map(_loader(table), rows))


def decode_calls(rows: Iterable[Row], choices: Iterable[Row], pieces: Mapping[int, Data]) -> list[Call]:
    """Rows of `calls`, their values as in `tables`; rows of `choices` by position; the pieces that they refer to."""
    load_call, load_choice = _loader(CALLS), _loader(CHOICES)
    of_call: dict[tuple[str, int, str], list[Choice]] = {}
    for row in choices:
        of_call.setdefault(row[:3], []).append(load_choice(row))
    calls = []
    for row in rows:
        rest, lengths, numbers, n_choices = row[_REQUEST]
        blocks, tail = row[_PROMPT]
        call = load_call(
            row,
            request=join_request(rest, lengths, numbers, pieces),
            # Further choices are left from a call with the same key that this one replaced.
            choices=tuple(of_call.get(row[:3], ())[:n_choices]),
            prompt_ids=None if blocks is None else _PROMPT_IDS.load(join_tokens(blocks, tail, pieces)),
        )
        calls.append(call)
    return calls


def _add_parts(call: Call, row: list[Any], rows: Rows, pieces: Pieces) -> None:
    """Add to a call's row what refers to other tables, and to these what it refers to."""
    row[_REQUEST] = (*pieces.split_request(call.request), len(call.choices))
    if call.prompt_ids is not None:
        row[_PROMPT] = pieces.split_tokens(_PROMPT_IDS.dump(call.prompt_ids))
    for position, choice in enumerate(call.choices):
        of_choice = _dump(CHOICES, choice)
        of_choice[:4] = row[0], row[1], row[2], position
        rows.setdefault(CHOICES, []).append(tuple(of_choice))


def _dump(table: Table[Any], record: Any) -> list[Any]:
    """The record's row, in which None stands for what is no field. ValueError names a field that cannot be stored."""
    try:
        return _dumper(table)(record)
    except (AttributeError, TypeError, ValueError):
        for _, field in _fields(table):
            value = getattr(record, field.name)
            try:
                _ = None if value is None and field.optional else field.kind.dump(value)
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(f"{field.name}: {error}") from error
        raise


def _fields(table: Table[Any]) -> list[tuple[int, Field]]:
    """The fields that have a column, with its place in a row."""
    return [(place, column.field) for place, column in enumerate(table.described) if column.field]


# Both are compiled for each table, from the names of its fields: loops over these take twice as long.
@cache
def _dumper(table: Table[Any]) -> Callable[[Any], list[Any]]:
    values, functions = ["None"] * len(table.values), {}
    for place, field in _fields(table):
        functions[f"dump_{field.name}"] = field.kind.dump
        values[place] = f"dump_{field.name}(record.{field.name})"
        if field.optional:
            values[place] = f"None if record.{field.name} is None else {values[place]}"
    dumper: Callable[[Any], list[Any]] = eval(f"lambda record: [{', '.join(values)}]", functions)
    return dumper


@cache
def _loader(table: Table[Any]) -> Callable[..., Any]:
    """It makes a record of a row and of the fields that have no column."""
    functions: dict[str, Any] = {"record": table.record}
    values = []
    for place, field in _fields(table):
        functions[f"load_{field.name}"] = field.kind.load
        value = f"row[{place}]" if field.kind.load is as_it_is else f"load_{field.name}(row[{place}])"
        values.append(f"{field.name}=" + (f"None if row[{place}] is None else {value}" if field.optional else value))
    loader: Callable[..., Any] = eval(f"lambda row, **apart: record({', '.join(values)}, **apart)", functions)
    return loader
