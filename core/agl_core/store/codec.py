"""Records as rows of the tables in `tables`, and back, exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

from agl_core.errors import StoreRefusedError
from agl_core.store.interface import Record
from agl_core.store.pieces import BLOCK_BYTES, Data, Pieces, dump_numbers, join_request, join_tokens, numbers_in
from agl_core.store.tables import ATTEMPT_KEYS, CALLS, RECORDS, Table
from agl_core.types import Call
from agl_core.types.forms import Field, dump_json, fields_of, from_json, load_json, values_of

Kept = TypeVar("Kept")
Row: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = dict[Table[Any], list[Row]]
"""What one `put` writes, by table."""

_TABLES: Mapping[type, Table[Any]] = {table.record: table for table in RECORDS}


def encode(records: Iterable[Record], pieces: Pieces) -> Rows:
    """The rows of these records, without their pieces. StoreRefusedError names a record that cannot be stored."""
    rows: Rows = {}
    for record in records:
        table = _TABLES.get(type(record))
        if table is None:
            raise StoreRefusedError(f"The store keeps records (Run … TrainingRecord), not {type(record).__name__}.")
        try:
            row = _dump(table, record, pieces)
        except (AttributeError, TypeError, ValueError) as error:
            raise StoreRefusedError(f"{name_of(record)} cannot be stored: {_explain(record, error)}.") from error
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
    """The records of these rows: rollout and attempt, then the table's columns. Calls need `decode_calls`."""
    names, fills = table.names, table.fills
    records = []
    for row in rows:
        values = load_json(row[-1])
        values.update(zip(names, row, strict=False))
        for name, text in zip(fills, row[len(names) :], strict=False):
            values[name] = None if text is None else load_json(text)
        records.append(from_json(table.record, values))
    return records


def decode_calls(rows: Iterable[Row], pieces: Mapping[int, Data]) -> list[Call]:
    """Like `decode`, with the pieces that the calls refer to."""
    calls = []
    for rollout, attempt, id, sequence, _, references, arrays, body in rows:
        values = load_json(body)
        values.update(rollout=rollout, attempt=attempt, id=id, sequence=sequence)
        numbers = iter(numbers_in(references))
        values["request"] = join_request(values["request"], values.pop("lists"), numbers, pieces)
        if prompt := values.get("prompt_ids"):
            arrays = arrays[: prompt[0]] + join_tokens(numbers, pieces) + arrays[prompt[0] :]
        calls.append(from_json(Call, values, arrays))
    return calls


def _dump(table: Table[Any], record: Any, pieces: Pieces) -> Row:
    arrays = bytearray()
    row = [_cell(field, getattr(record, field.name)) for field in table.outside]
    if "\0" in row[0]:  # SQLite looks rollouts up with its JSON functions, which end a text there
        raise ValueError(f"the id {row[0]!r} contains a NUL character; leave it out")
    for name in table.fills:
        value = getattr(record, name)
        row.append(None if value is None else dump_json(value))
    values = values_of(record, table.inside, arrays)
    if table is CALLS:
        row += _add_pieces(record, values, arrays, pieces)
    return (*row, dump_json(values))


def _cell(field: Field, value: Any) -> Any:
    if value is None:
        return None
    cell = field.to_json(value, None)
    if isinstance(cell, str):
        try:
            cell.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{cell!r:.60} is no UTF-8; leave surrogates out") from None
    return cell


def _add_pieces(call: Call, values: dict[str, Any], arrays: bytearray, pieces: Pieces) -> Row:
    """Take what repeats out of a call's values and arrays; returns the columns before its body."""
    values["request"], values["lists"], numbers = pieces.split_request(call.request)
    if call.prompt_ids is not None:  # it is the last array
        start = values["prompt_ids"][0]
        end = start + (len(arrays) - start) // BLOCK_BYTES * BLOCK_BYTES
        numbers += pieces.split_tokens(bytes(arrays[start:end]))
        del arrays[start:end]
    trace = None if call.trace is None or call.late or call.undelivered else call.trace.encode("utf-8", "surrogatepass")
    return trace, dump_numbers(numbers), bytes(arrays)


def _explain(record: Any, error: Exception) -> str:
    """The error, with the field that has it."""
    for field in fields_of(type(record)).values():  # type: ignore[arg-type]
        try:
            dump_json(values_of(record, [field], bytearray()))
        except (AttributeError, TypeError, ValueError) as own:
            return f"{field.name}: {own}"
    return str(error)
