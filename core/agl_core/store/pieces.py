"""What repeats is stored once: messages and tool schemas of requests, and blocks of prompt tokens.

A chat request repeats the whole conversation, so the requests of an episode of T turns hold T²/2 messages, and
the same goes for their prompt tokens. Every item of a request's lists of objects, and every full block of
prompt tokens, is therefore a *piece*: a numbered row that calls refer to. Turns of one rollout share pieces, and
so do siblings of a group (their task) and all rollouts of an agent (its system prompt and tools). A long text inside an
item is a piece of its own: an image, as a data URL, is stored once, even if an agent sends it with new words each time.

Equal pieces are recognised by a hash in memory, not by an index in the file: that index would be in random
order, and cost more to write than everything else. What memory has forgotten, or another process wrote, is
written again; that costs space and changes nothing.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Mapping
from hashlib import blake2b
from typing import TypeAlias, TypeVar

import numpy as np

from agl_core.errors import StoreError
from agl_core.types import Json
from agl_core.types.forms import dump_json, load_json

Data: TypeAlias = str | bytes
"""A piece: JSON as text, or a block of tokens as bytes."""
DataType = TypeVar("DataType", str, bytes)

BLOCK_BYTES = 256 * 4
"""256 int32 tokens: large enough that a block's row costs little beside its content, small enough that the
tail, which every call stores for itself, stays short."""
NUMBERS = np.dtype("<i8")
"""Of pieces, in a column of a call."""
_LONG = 16 << 10
"""Characters from which on a text inside an item is a piece of its own."""
_TEXTS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')


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
        """A request as (JSON without its lists of objects, the pieces of their items as JSON, the pieces' numbers).

        The pieces are a list's length if each item is one, else the count of each item's pieces.
        """
        rest: dict[str, Json] = {}
        lengths: dict[str, int | list[int]] = {}
        numbers: list[int] = []
        for name, value in request.items():
            if not (isinstance(value, list | tuple) and value and isinstance(value[0], dict)):
                rest[name] = value
                continue
            rest[name], counts = None, []
            for item in value:
                parts = _parts(dump_json(item))
                numbers += [self._number(blake2b(part.encode(), digest_size=16).digest(), part) for part in parts]
                counts.append(len(parts))
            lengths[name] = counts if max(counts) > 1 else len(counts)
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


def _parts(text: str) -> list[str]:
    """JSON, cut before and after each of its long texts."""
    if len(text) < _LONG:
        return [text]
    cuts = [cut for match in _TEXTS.finditer(text) if len(match[0]) >= _LONG for cut in match.span()]
    return [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]


def numbers_in(column: bytes | None) -> tuple[int, ...]:
    """The numbers of pieces in a column of a call."""
    return () if column is None else struct.unpack(f"<{len(column) // NUMBERS.itemsize}q", column)


def join_request(rest: str, lengths: str, numbers: bytes, pieces: Mapping[int, Data]) -> dict[str, Json]:
    """The inverse of `Pieces.split_request`."""
    request: dict[str, Json] = load_json(rest)
    parts = (_piece(str, number, pieces) for number in numbers_in(numbers))
    for name, length in load_json(lengths).items():
        counts = [1] * length if isinstance(length, int) else length
        request[name] = [load_json("".join([next(parts) for _ in range(count)])) for count in counts]
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
