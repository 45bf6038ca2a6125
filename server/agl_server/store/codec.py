"""Records as rows of tables, and back, exactly; what repeats in calls is stored once.

A chat request repeats the whole conversation: the requests of T turns hold T²/2 messages, and as many prompt tokens.
Every item of a request's lists of objects, and every full block of prompt tokens, is therefore a *piece*: a numbered
row that calls refer to. Turns share pieces, and so do siblings of a group and all rollouts of an agent.

Equal pieces are recognised by a hash in memory: an index in the file would be in random order, and cost more to write
than everything else. A piece that memory has forgotten, or another process wrote, is written again.
"""

from __future__ import annotations

import itertools
import struct
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from agl_core.errors import StoreError, StoreRefusedError
from agl_core.store import Record
from agl_core.types import (
    Annotation,
    Attempt,
    Call,
    Choice,
    Json,
    Recomputed,
    Reward,
    Rollout,
    Run,
    ToolResult,
    TrainingRecord,
)
from agl_core.types.forms import dump_json, from_json, load_json, to_json


class Table(NamedTuple):
    name: str
    columns: tuple[str, ...]
    row: str
    """Its values, in SQL."""
    conflict: str
    """The clause for a row whose key is there already."""


PIECES = Table("pieces", ("seq", "data"), "(?, ?)", "")
ATTEMPTS = Table("attempts", ("rollout", "attempt"), "(?, ?)", "ON CONFLICT DO NOTHING")
LEASES = Table("leases", ("rollout", "attempt", "worker", "renewals"), "(?, ?, ?, ?)", "")
RUNS = Table(
    "runs",
    ("id", "restart", "body"),
    "(?, ?, ?)",
    "ON CONFLICT (id, restart) DO UPDATE SET body = excluded.body",
)
ROLLOUTS = Table(
    "rollouts",
    ("id", "run", "step", "mode", "state", '"group"', "body"),
    "(?, ?, ?, ?, ?, ?, ?)",
    "ON CONFLICT (id) DO UPDATE SET run = excluded.run, step = excluded.step, mode = excluded.mode, "
    'state = excluded.state, "group" = excluded."group", body = excluded.body',
)
RECORDS = Table(
    "records",
    ("owner", "kind", "key", "pieces", "arrays", "body"),
    "((SELECT seq FROM attempts WHERE rollout = ? AND attempt = ?), ?, ?, ?, ?, ?)",
    "ON CONFLICT (owner, kind, key) DO UPDATE SET pieces = excluded.pieces, arrays = excluded.arrays, "
    "body = merged(kind, body, excluded.body)",
)
TABLES = (ATTEMPTS, RUNS, ROLLOUTS, RECORDS, LEASES)
"""In the order of writing, after pieces: what others refer to comes first."""


@cache
def insertion(table: Table, rows: int) -> str:
    """The statement that writes `rows` rows at once.

    Many rows in one statement, because sqlite3 gives up the interpreter lock once per statement: row by row,
    a busy event loop would make the writer wait for the lock at every row.
    """
    values = ", ".join([table.row] * rows)
    return f"INSERT INTO {table.name} ({', '.join(table.columns)}) VALUES {values} {table.conflict}"


Kept = TypeVar("Kept")
Data: TypeAlias = str | bytes
"""A piece: JSON as text, or a block of tokens as bytes."""
DataType = TypeVar("DataType", str, bytes)
Row: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = dict[Table, list[Row]]
"""The rows that one `put` writes, by table."""

BLOCK_BYTES = 256 * 4
"""256 int32 tokens: a row costs little beside them, and the tail that each call stores for itself stays short."""
_SHORT = 256
"""Characters of an item from which on memory keeps its digest instead."""
_MAX_LATEST = 64 << 20
"""Characters and bytes of conversations kept in memory, so that each turn costs what it adds."""
NUMBERS = np.dtype("<i8")
"""Numbers of pieces, in a column of a call."""
_TOKENS = np.dtype("<i4")
_ARRAYS = {"response_ids": _TOKENS, "logprobs": np.dtype("<f4"), "mask": np.dtype("?")}
"""The fields of a choice that are bytes in the row of its call, in this order."""
_APART = ("request", "choices", "prompt_ids")
_KEYS: Mapping[type, tuple[str, ...]] = {
    Attempt: (),
    Call: ("id",),
    ToolResult: ("source", "id"),
    Reward: ("name", "source", "call", "choice"),
    TrainingRecord: ("call", "choice"),
    Annotation: ("id",),
}
"""The key of an attempt's record among those of its kind."""
_FILLED = ("tool_call_id", "agent", "parent_span")
"""Filled in later by spans around a tool's own, which end after it."""


def encode(records: Iterable[Record], pieces: Pieces) -> Rows:
    """The rows of these records, without their pieces. StoreRefusedError names a record that cannot be stored."""
    rows: Rows = {}
    for record in records:
        try:
            for table, row in _encode(record, pieces):
                rows.setdefault(table, []).append(row)
        except (AttributeError, TypeError, ValueError) as error:
            raise StoreRefusedError(f"{name_of(record)} cannot be stored: {error}.") from error
    return rows


def _encode(record: Record, pieces: Pieces) -> list[tuple[Table, Row]]:
    if isinstance(record, Run):
        return [(RUNS, (record.id, record.restart, dump_json(to_json(record))))]
    if isinstance(record, Rollout):
        body = to_json(record)
        _check_id(record.id)
        return [(ROLLOUTS, (*(body[column.strip('"')] for column in ROLLOUTS.columns[:-1]), dump_json(body)))]
    kind = type(record)
    if kind not in _KEYS:
        raise TypeError(f"the store keeps records (Run … TrainingRecord), not {kind.__name__}")
    blobs: tuple[bytes | None, bytes | None] = (None, None)
    if isinstance(record, Call):
        body = to_json(record, _APART, brief=True)
        blobs = _take_apart(record, body, pieces)
    elif isinstance(record, TrainingRecord) and (recomputed := record.recomputed) is not None:
        body = to_json(record, ("recomputed",), brief=True) | {"recomputed": to_json(recomputed, ("logprobs",))}
        blobs = None, _dump_array("logprobs", recomputed.logprobs, _ARRAYS["logprobs"])
    else:
        body = to_json(record, brief=True)
    owner = (body["rollout"], body["attempt"])
    _check_id(record.rollout)
    key = dump_json([body.get(name) for name in _KEYS[kind]])
    return [(ATTEMPTS, owner), (RECORDS, (*owner, kind.__name__, key, *blobs, dump_json(body)))]


def _check_id(rollout: str) -> None:
    if "\0" in rollout:  # SQLite looks rollouts up with its JSON functions, which end a text there
        raise ValueError(f"the id {rollout!r} contains a NUL character; leave it out")


def name_of(record: Record) -> str:
    """The record's kind and key, for messages."""
    fields = ("rollout", "attempt", "id", "name", "call", "choice", "step")
    known = [f"{field} {getattr(record, field)!r}" for field in fields if hasattr(record, field)]
    return f"{type(record).__name__} ({', '.join(known)})"


def merge(kind: str, earlier: str, later: str) -> str:
    """The body of a record that comes again under its key: the later one, except for tool results and annotations.

    Their first one stands, since anything that the agent starts may report something else later; a tool result gets
    only fields that it lacks.
    """
    if kind == Annotation.__name__:
        return earlier
    if kind != ToolResult.__name__:
        return later
    body, again = load_json(earlier), load_json(later)
    return dump_json({**{name: again[name] for name in _FILLED if name in again}, **body})


def decode(kind: type[Kept], rows: Iterable[Sequence[Any]]) -> list[Kept]:
    """The records of rows of bodies, and of the array that a training record may have. Calls: `decode_call`."""
    return [_decode(kind, *row) for row in rows]


def _decode(kind: type[Kept], body: str, array: bytes | None = None) -> Kept:
    data = load_json(body)
    if array is None:
        return from_json(kind, data)
    logprobs = np.frombuffer(array, _ARRAYS["logprobs"])
    return from_json(kind, data, recomputed=from_json(Recomputed, data.pop("recomputed"), logprobs=logprobs))


def _take_apart(call: Call, body: dict[str, Json], pieces: Pieces) -> tuple[bytes, bytes]:
    """Complete a call's body, and return what is beside it: the numbers of its pieces, and its arrays."""
    owner = (call.rollout, call.attempt, call.agent)
    numbers, body["request"], body["lists"] = pieces.split_request(call.request, owner)
    arrays = []
    if call.prompt_ids is not None:
        blocks, tail = pieces.split_tokens(_dump_array("prompt_ids", call.prompt_ids, _TOKENS), owner)
        numbers += blocks
        arrays.append(tail)
        body["tail"] = len(tail)
    body["choices"] = choices = []
    for choice in call.choices:
        sizes = {}
        for name, dtype in _ARRAYS.items():
            if (array := getattr(choice, name)) is not None:
                arrays.append(_dump_array(name, array, dtype))
                sizes[name] = len(arrays[-1])
        choices.append({**to_json(choice, _ARRAYS, brief=True), "sizes": sizes})
    return struct.pack(f"<{len(numbers)}q", *numbers), b"".join(arrays)


def decode_call(body: str, numbers: bytes | None, arrays: bytes | None, pieces: Mapping[int, Data]) -> Call:
    """The call of a row, with the pieces that it refers to."""
    data, numbered, start = load_json(body), iter(numbers_in(numbers)), 0
    request, choices, tail = data.pop("request"), data.pop("choices"), data.pop("tail", None)
    for name, length in data.pop("lists").items():
        request[name] = [load_json(_piece(str, n, pieces)) for n in itertools.islice(numbered, length)]

    def taken(size: int) -> bytes:
        nonlocal start
        start += size
        return (arrays or b"")[start - size : start]

    prompt = None
    if tail is not None:
        blocks = [_piece(bytes, number, pieces) for number in numbered]
        prompt = np.frombuffer(b"".join([*blocks, taken(tail)]), _TOKENS)
    sampled = []
    for choice in choices:
        sizes = choice.pop("sizes")
        sampled.append(
            from_json(Choice, choice, **{n: np.frombuffer(taken(sizes[n]), _ARRAYS[n]) for n in _ARRAYS if n in sizes})
        )
    return from_json(Call, data, request=request, choices=tuple(sampled), prompt_ids=prompt)


def _dump_array(name: str, array: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        actual = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"{name}: it must be a numpy array of {dtype} with one axis, not {actual}; convert before")
    return array.astype(dtype, copy=False).tobytes()


class Pieces:
    """Takes requests and prompts apart, and numbers the pieces that it has not seen lately.

    >>> pieces = Pieces(first=1)
    >>> pieces.split_request({"model": "m", "messages": [{"role": "user"}]})
    ([1], {'model': 'm', 'messages': None}, {'messages': 1})
    >>> pieces.take()
    [(1, '{"role":"user"}')]
    """

    def __init__(self, first: int, limit: int = 50_000) -> None:
        self._next = first
        self._limit = limit
        self._recent: dict[Data, int] = {}
        self._older: dict[Data, int] = {}
        self._due: list[tuple[int, Data]] = []
        self._latest: OrderedDict[Hashable, tuple[Data, list[int]]] = OrderedDict()
        """The latest list or prompt of each owner, and its numbers; the least recently used first."""
        self._latest_size = 0

    def take(self) -> list[tuple[int, Data]]:
        """Rows that must be committed no later than what was split so far."""
        due, self._due = self._due, []
        return due

    def give_back(self, rows: list[tuple[int, Data]]) -> None:
        """Rows that were taken and not committed: later calls may refer to them already."""
        self._due = rows + self._due

    def forget(self) -> int:
        """Refer no more to what was numbered so far; returns the first number that is given from now on."""
        self._recent, self._older, self._latest_size = {}, {}, 0
        self._latest.clear()
        return self._next

    def split_request(
        self, request: Mapping[str, Json], owner: Hashable = None
    ) -> tuple[list[int], dict[str, Json], dict[str, int]]:
        """A request as (numbers of its pieces, the rest without its lists of objects, lengths of these lists)."""
        rest: dict[str, Json] = {}
        lengths: dict[str, int] = {}
        numbers: list[int] = []
        for name, value in request.items():
            if not (isinstance(value, list | tuple) and value and isinstance(value[0], dict)):
                rest[name] = value
                continue
            rest[name], lengths[name] = None, len(value)
            text = dump_json(value)
            known = self._known((owner, name), text, ",]")
            known += [self._number(_key_of(item), item) for item in map(dump_json, value[len(known) :])]
            self._keep((owner, name), text[:-1], known)
            numbers += known
        return numbers, rest, lengths

    def split_tokens(self, tokens: bytes, owner: Hashable = None) -> tuple[list[int], bytes]:
        """Token bytes as (numbers of the full blocks, the rest)."""
        full = len(tokens) - len(tokens) % BLOCK_BYTES
        known = self._known(owner, tokens)
        blocks = (tokens[start : start + BLOCK_BYTES] for start in range(len(known) * BLOCK_BYTES, full, BLOCK_BYTES))
        digests = ((blake2b(block, digest_size=16, person=b"tokens").digest(), block) for block in blocks)
        known += [self._number(digest, block) for digest, block in digests]
        self._keep(owner, tokens[:full], known)
        return known, tokens[full:]

    def _known(self, owner: Hashable, data: Data, after: Collection[Data] = ()) -> list[int]:
        """The numbers of the owner's latest data, if the new data begins with it, and goes on with one of `after`."""
        latest, numbers = self._latest.pop(owner, ("", []))
        self._latest_size -= len(latest)
        begins = latest and data.startswith(latest)  # type: ignore[arg-type]  # An owner's data are of one type.
        return [*numbers] if begins and (not after or data[len(latest) : len(latest) + 1] in after) else []

    def _keep(self, owner: Hashable, data: Data, numbers: list[int]) -> None:
        self._latest[owner] = data, numbers
        self._latest_size += len(data)
        while self._latest_size > _MAX_LATEST:
            self._latest_size -= len(self._latest.popitem(last=False)[1][0])

    def _number(self, key: Data, data: Data) -> int:
        number = self._recent.get(key)
        if number is not None:
            return number
        number = self._older.get(key)
        if number is None:
            number = self._next
            self._next += 1
            self._due.append((number, data))
        self._recent[key] = number
        if len(self._recent) >= self._limit:
            self._older, self._recent = self._recent, {}
        return number


def _key_of(item: str) -> Data:
    """The key under which an equal item is recognised: a short one is its own, which is faster than a digest."""
    return item if len(item) < _SHORT else blake2b(item.encode(), digest_size=16).digest()


def numbers_in(column: bytes | None) -> tuple[int, ...]:
    """The numbers of pieces in a column of a call."""
    return () if column is None else struct.unpack(f"<{len(column) // NUMBERS.itemsize}q", column)


def _piece(type_: type[DataType], number: int, pieces: Mapping[int, Data]) -> DataType:
    piece = pieces.get(number)
    if not isinstance(piece, type_):
        raise StoreError(f"The store is damaged: piece {number} of a call is missing or of another kind.")
    return piece
