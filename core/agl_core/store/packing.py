"""Records, and questions for them, as they cross the wire: exactly.

Records cross as the very rows that the store would write, so that what the store keeps exactly also arrives exactly,
and what repeats in them (messages, tool schemas, prompts) crosses once.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agl_core.errors import StoreRefusedError
from agl_core.store.codec import Row, decode, decode_calls, encode
from agl_core.store.interface import Record, Store
from agl_core.store.pieces import Pieces
from agl_core.store.tables import ATTEMPT_KEYS, CALLS, CHOICES, RECORDS, Column, Table
from agl_core.types import AttemptKey
from agl_core.wire import trainers as wire

_PACKED: Mapping[str, Table[Any]] = {table.name: table for table in (*RECORDS, CHOICES)}
_POSITION = CHOICES.values.index("position")
_SMALLEST, _BEYOND = -(2**63), 2**63


def pack(records: Iterable[Record]) -> wire.PackedRecords:
    """The records, ready to be sent. StoreRefusedError names one that no store could keep either.

    >>> from agl_core.types import Reward
    >>> pack([Reward("r", 0, "right", 1.0, "rule")]).tables
    {'rewards': [['r', 0, 'right', 1.0, 'rule', None, 0]]}
    """
    pieces = Pieces(first=1)
    rows = encode(records, pieces)
    rows.pop(ATTEMPT_KEYS, None)
    return wire.PackedRecords.model_construct(
        tables={table.name: [[_cell(value) for value in row] for row in found] for table, found in rows.items()},
        pieces=[(number, _cell(data)) for number, data in pieces.take()],
    )


def unpack(packed: wire.PackedRecords) -> list[Record]:
    """The records, kind by kind, each kind in its order; StoreRefusedError if they are no records.

    >>> from agl_core.types import Reward
    >>> unpack(pack([Reward("r", 0, "right", 1.0, "rule")]))
    [Reward(rollout='r', attempt=0, name='right', value=1.0, source='rule', call=None, choice=0)]
    """
    for name in packed.tables:
        if name not in _PACKED:
            raise StoreRefusedError(f"There is no table of records {name!r}. There are: {', '.join(_PACKED)}.")
    rows = {table: _rows(table, packed.tables.get(table.name, ())) for table in _PACKED.values()}
    calls, choices = rows.pop(CALLS), rows.pop(CHOICES)
    # A call that was packed twice has its choices twice.
    latest = {(*row[:3], row[_POSITION]): row for row in choices}
    ordered = sorted(latest.values(), key=lambda row: int(row[_POSITION]))
    try:
        pieces = {number: _bytes(data) if isinstance(data, wire.Binary) else data for number, data in packed.pieces}
        decoded = [record for table in rows for record in decode(table, rows[table])]
        return decoded + decode_calls(calls, ordered, pieces)
    except Exception as error:  # any error of the decoders is the rows' fault
        raise StoreRefusedError(f"These rows are no records ({type(error).__name__}: {error}).") from error


async def answer(store: Store, question: wire.StoreQuestion) -> Sequence[Record]:
    """What the store answers; StoreRefusedError if it has no answer."""
    match question:
        case wire.RunsQuery():
            return await store.runs()
        case wire.RolloutsQuery():
            return await store.rollouts(**question.model_dump(exclude={"kind"}))
        case wire.RolloutQuery(prefix=prefix):
            return [await store.rollout(prefix)]
        case wire.AttemptsQuery(rollouts=rollouts):
            return await store.attempts(*rollouts)
        case wire.RecordsQuery(kind=kind, attempts=attempts):
            recorded: Mapping[str, Callable[..., Any]] = {
                "calls": store.calls,
                "tool_results": store.tool_results,
                "rewards": store.rewards,
                "training_records": store.training_records,
            }
            found: Sequence[Record] = await recorded[kind](AttemptKey(each.rollout, each.attempt) for each in attempts)
            return found


def _cell(value: Any) -> Any:
    if isinstance(value, bytes):
        return wire.Binary.model_construct(base64=base64.b64encode(value).decode())
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _rows(table: Table[Any], rows: Sequence[Sequence[wire.Cell]]) -> list[Row]:
    columns = table.described
    for row in rows:
        if len(row) != len(columns):
            raise StoreRefusedError(
                f"A row of {table.name} has {len(columns)} values ({', '.join(table.values)}), not {len(row)}."
            )
    try:
        return [tuple(map(_value, columns, row)) for row in rows]
    except ValueError as error:
        raise StoreRefusedError(f"A row of {table.name} has a wrong value: {error}.") from error


def _value(column: Column, cell: wire.Cell) -> Any:
    value = _bytes(cell) if isinstance(cell, wire.Binary) else cell
    match column.type, value:
        case _, None if column.optional:
            return None
        case ("TEXT" | "TEXT OR BLOB", str()) | ("BLOB" | "TEXT OR BLOB", bytes()) | ("REAL", float()):
            return value
        case "INTEGER" | "REAL", int() if _SMALLEST <= value < _BEYOND:
            return value if column.type == "INTEGER" else float(value)
        case "REAL", "nan" | "inf" | "-inf":
            return float(value)
    raise ValueError(f"{column.name} is {column.type} in the store, not {cell!r:.60}")


def _bytes(data: wire.Binary) -> bytes:
    try:
        return base64.b64decode(data.base64, validate=True)
    except ValueError as error:
        raise ValueError(f"{data.base64!r:.60} is no base64 ({error})") from error
