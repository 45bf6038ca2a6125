"""Records as JSON that crosses the wire, exactly.

They cross as the very rows that the store would write, so that what the store keeps exactly also arrives exactly, and
what repeats in them (messages, tool schemas, prompts) crosses once.
"""

from __future__ import annotations

import base64
import math
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from agl_core.errors import StoreRefusedError
from agl_core.store import codec, schema
from agl_core.store.codec import Row
from agl_core.store.interface import Record
from agl_core.store.pieces import Data, Pieces
from agl_core.store.schema import Table
from agl_core.store.values import UnstorableError
from agl_core.types import Call
from agl_core.wire.operators import Binary, Cell, PackedRecords

_FREE_TEXT = frozenset({"agent", "parent_span", "retry_of", "tool", "tool_call_id", "error", "span", "parse_error"})
"""Columns of text that may hold lone surrogates, and then are bytes."""
_SMALLEST, _BEYOND = -(2**63), 2**63

_DECODERS: Mapping[Table, Callable[[Row], Record]] = {
    schema.RUNS: codec.decode_run,
    schema.ROLLOUTS: codec.decode_rollout,
    schema.ATTEMPTS: codec.decode_attempt,
    schema.OUTCOMES: codec.decode_outcome,
    schema.REWARDS: codec.decode_reward,
    schema.USES: codec.decode_use,
}
_PACKED: Mapping[str, Table] = {table.name: table for table in (*_DECODERS, schema.CALLS, schema.CHOICES)}


def pack(records: Iterable[Record]) -> PackedRecords:
    """The records, ready to be sent. StoreRefusedError names one that no store could keep either.

    >>> from agl_core.types import Reward
    >>> pack([Reward("r", 0, "right", 1.0, "rule")]).tables
    {'rewards': [['r', 0, 'right', 1.0, 'rule', None, 0]]}
    """
    chosen = list(records)
    try:
        return _packed(chosen)
    except UnstorableError:
        for record in chosen:
            try:
                _packed([record])
            except UnstorableError as error:
                raise StoreRefusedError(f"{codec.name_of(record)} cannot be stored: {error}.") from error
        raise


def _packed(records: Iterable[Record]) -> PackedRecords:
    pieces = Pieces(first=1)
    rows = codec.encode(records, pieces)
    return PackedRecords.model_construct(
        tables={
            table.name: [[_cell(value) for value in row] for row in found]
            for table, found in rows.items()
            if table.name in _PACKED
        },
        pieces=[(number, _cell(data)) for number, data in pieces.take()],
    )


def unpack(packed: PackedRecords) -> list[Record]:
    """The records, kind by kind, each kind in its order; StoreRefusedError if they are no records.

    >>> from agl_core.types import Reward
    >>> unpack(pack([Reward("r", 0, "right", 1.0, "rule")]))
    [Reward(rollout='r', attempt=0, name='right', value=1.0, source='rule', call=None, choice=0)]
    """
    for name in packed.tables:
        if name not in _PACKED:
            raise StoreRefusedError(f"There is no table of records {name!r}. There are: {', '.join(_PACKED)}.")
    rows = {table: _rows(table, packed.tables.get(table.name, ())) for table in _PACKED.values()}
    try:
        decoded = [decode(row) for table, decode in _DECODERS.items() for row in rows[table]]
        return decoded + _calls(rows[schema.CALLS], rows[schema.CHOICES], packed)
    except Exception as error:  # whatever the decoders stumble over, the rows are what is wrong
        raise StoreRefusedError(f"These rows are no records ({type(error).__name__}: {error}).") from error


def _calls(rows: Sequence[Row], choices: Sequence[Row], packed: PackedRecords) -> list[Call]:
    pieces: dict[int, Data] = {
        number: base64.b64decode(data.base64, validate=True) if isinstance(data, Binary) else data
        for number, data in packed.pieces
    }
    position = schema.CHOICES.values.index("position")
    latest = {(*row[:3], row[position]): row for row in choices}  # a call that was packed twice has them twice
    return codec.decode_calls(rows, sorted(latest.values(), key=lambda row: int(row[position])), pieces)


def _cell(value: Any) -> Any:
    """A value of a row as JSON can say it."""
    if isinstance(value, bytes):
        return Binary.model_construct(base64=base64.b64encode(value).decode())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UnstorableError(f"{value!r:.60} is no UTF-8 ({error.reason}); leave surrogates out") from error
    return value


class _Column(NamedTuple):
    name: str
    type: str
    """TEXT, INTEGER, REAL or BLOB."""
    required: bool


@cache
def _columns(table: Table) -> tuple[_Column, ...]:
    """What a row's values may be: exactly what the store's own table takes."""
    connection = sqlite3.connect(":memory:")
    try:
        schema.migrate(connection, schema.MIGRATIONS, "memory")
        declared = {
            name: (type_, bool(required))
            for _, name, type_, required, *_ in connection.execute(f"PRAGMA table_info({table.name})")
        }
    finally:
        connection.close()
    declared |= {"rollout": ("TEXT", True)} if "attempt_key" in declared else {}
    declared |= {"attempt": ("INTEGER", True)} if "attempt_key" in declared else {}
    return tuple(_Column(name, *declared[name]) for name in table.values)


def _rows(table: Table, rows: Sequence[Sequence[Cell]]) -> list[Row]:
    columns = _columns(table)
    found = []
    for row in rows:
        if len(row) != len(columns):
            raise StoreRefusedError(
                f"A row of {table.name} has {len(columns)} values ({', '.join(table.values)}), not {len(row)}."
            )
        found.append(tuple(_value(table, column, cell) for column, cell in zip(columns, row, strict=True)))
    return found


def _value(table: Table, column: _Column, cell: Cell) -> Any:
    """A value as the store has it."""
    match column.type, cell:
        case _, None if not column.required:
            return None
        case "TEXT", str():
            return cell
        case "TEXT", Binary() if column.name in _FREE_TEXT:
            return _bytes(table, column, cell)
        case "INTEGER", int() if _SMALLEST <= cell < _BEYOND:
            return cell
        case "REAL", float():
            return cell
        case "REAL", int() if _SMALLEST <= cell < _BEYOND:
            return float(cell)
        case "REAL", "nan" | "inf" | "-inf":
            return float(cell)
        case "BLOB", Binary():
            return _bytes(table, column, cell)
    raise _wrong(table, column, f"it is {column.type} in the store, not {cell!r:.60}")


def _bytes(table: Table, column: _Column, cell: Binary) -> bytes:
    try:
        return base64.b64decode(cell.base64, validate=True)
    except ValueError as error:
        raise _wrong(table, column, f"its base64 is wrong: {error}") from error


def _wrong(table: Table, column: _Column, problem: str) -> StoreRefusedError:
    return StoreRefusedError(f"A row of {table.name} has a wrong value of {column.name}: {problem}.")
