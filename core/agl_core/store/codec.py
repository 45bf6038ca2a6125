"""Records as rows of the tables in `tables`, and back, exactly; what repeats in calls is stored once.

A chat request repeats the whole conversation, so the requests of an episode of T turns hold T²/2 messages, and the same
goes for their prompt tokens. Every item of a request's lists of objects, and every full block of prompt tokens, is
therefore a *piece*: a numbered row that calls refer to. Turns of one rollout share pieces, and so do siblings of a
group (their task) and all rollouts of an agent (its system prompt and tools).

Equal pieces are recognised by a hash in memory, not by an index in the file: that index would be in random order, and
cost more to write than everything else. What memory has forgotten, or another process wrote, is written again; that
costs space and changes nothing.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import blake2b
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import numpy as np

from agl_core.errors import StoreError, StoreRefusedError
from agl_core.store.interface import Record
from agl_core.store.tables import ATTEMPT_KEYS, CALLS, CHOICES, RECORDS, Table
from agl_core.types import Call, Choice, Json
from agl_core.types.forms import dump_json, fields_of, load_json

Kept = TypeVar("Kept")
Data: TypeAlias = str | bytes
"""A piece: JSON as text, or a block of tokens as bytes."""
DataType = TypeVar("DataType", str, bytes)
Row: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = dict[Table[Any], list[Row]]
"""What one `put` writes, by table."""

BLOCK_BYTES = 256 * 4
"""256 int32 tokens: large enough that a block's row costs little beside its content, small enough that the
tail, which every call stores for itself, stays short."""
NUMBERS = np.dtype("<i8")
"""Of pieces, in a column of a call."""
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
                row += (None, None) if record.prompt_ids is None else pieces.split_tokens(_dump_prompt(record))
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


def _dump_prompt(call: Call) -> bytes:
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


class Pieces:
    """Takes requests and prompts apart, and numbers the pieces that it has not seen lately.

    >>> pieces = Pieces(first=1)
    >>> pieces.split_request({"model": "m", "messages": [{"role": "user"}]})
    ('{"model":"m","messages":null}', '{"messages":1}', b'\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00')
    >>> pieces.take()
    [(1, '{"role":"user"}')]
    """

    def __init__(self, first: int, limit: int = 50_000) -> None:
        self._next = first
        self._limit = limit
        self._recent: dict[bytes, int] = {}
        self._older: dict[bytes, int] = {}
        self._due: list[tuple[int, Data]] = []

    def take(self) -> list[tuple[int, Data]]:
        """Rows that must be committed no later than what was split so far."""
        due, self._due = self._due, []
        return due

    def give_back(self, rows: list[tuple[int, Data]]) -> None:
        """Rows that were taken and not committed: later calls may refer to them already."""
        self._due = rows + self._due

    def forget(self) -> int:
        """Refer no more to what was numbered so far; returns the first number that is given from now on."""
        self._recent, self._older = {}, {}
        return self._next

    def split_request(self, request: Mapping[str, Json]) -> tuple[str, str, bytes]:
        """A request as (JSON without its lists of objects, the lengths of these as JSON, their pieces' numbers)."""
        rest: dict[str, Json] = {}
        lengths: dict[str, int] = {}
        numbers: list[int] = []
        for name, value in request.items():
            if not (isinstance(value, list | tuple) and value and isinstance(value[0], dict)):
                rest[name] = value
                continue
            rest[name], lengths[name] = None, len(value)
            items = map(dump_json, value)
            numbers += [self._number(blake2b(item.encode(), digest_size=16).digest(), item) for item in items]
        return dump_json(rest), dump_json(lengths), _dump_numbers(numbers)

    def split_tokens(self, tokens: bytes) -> tuple[bytes, bytes]:
        """Token bytes as (numbers of the full blocks, the rest)."""
        full = len(tokens) - len(tokens) % BLOCK_BYTES
        blocks = (tokens[start : start + BLOCK_BYTES] for start in range(0, full, BLOCK_BYTES))
        digests = ((blake2b(block, digest_size=16, person=b"tokens").digest(), block) for block in blocks)
        return _dump_numbers([self._number(digest, block) for digest, block in digests]), tokens[full:]

    def _number(self, digest: bytes, data: Data) -> int:
        number = self._recent.get(digest)
        if number is not None:
            return number
        number = self._older.get(digest)
        if number is None:
            number = self._next
            self._next += 1
            self._due.append((number, data))
        self._recent[digest] = number
        if len(self._recent) >= self._limit:
            self._older, self._recent = self._recent, {}
        return number


def numbers_in(column: bytes | None) -> tuple[int, ...]:
    """The numbers of pieces in a column of a call."""
    return () if column is None else struct.unpack(f"<{len(column) // NUMBERS.itemsize}q", column)


def join_request(rest: str, lengths: str, numbers: bytes, pieces: Mapping[int, Data]) -> dict[str, Json]:
    """The inverse of `Pieces.split_request`."""
    request: dict[str, Json] = load_json(rest)
    items = (load_json(_piece(str, number, pieces)) for number in numbers_in(numbers))
    for name, length in load_json(lengths).items():
        request[name] = list(itertools.islice(items, length))
    return request


def join_tokens(numbers: bytes, tail: bytes, pieces: Mapping[int, Data]) -> bytes:
    """The inverse of `Pieces.split_tokens`."""
    return b"".join([*(_piece(bytes, number, pieces) for number in numbers_in(numbers)), tail])


def _dump_numbers(numbers: list[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _piece(type_: type[DataType], number: int, pieces: Mapping[int, Data]) -> DataType:
    piece = pieces.get(number)
    if not isinstance(piece, type_):
        raise StoreError(f"The store is damaged: piece {number} of a call is missing or of another kind.")
    return piece
