"""Stores what repeats once: messages and tool schemas of requests, and blocks of prompt tokens.

A chat request repeats the whole conversation, so the requests of an episode of T turns hold T²/2 messages, and
the same goes for their prompt tokens. Every item of a request's lists of objects, and every full block of
prompt tokens, is therefore a *piece*: a row named by the hash of its content, which calls refer to. Turns of one
rollout share pieces, and so do siblings of a group (their task) and all rollouts of an agent (its system
prompt and tools).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import TypeVar

from agl_core.errors import StoreError
from agl_core.store.values import dump_json, load_json
from agl_core.types import Json

Kind = TypeVar("Kind", str, bytes)

HASH_BYTES = 16
BLOCK_BYTES = 256 * 4
"""256 int32 tokens: large enough that a block's row costs little beside its content, small enough that the
tail, which every call stores for itself, stays short."""


class SeenPieces:
    """Hashes of pieces that are known to be committed, so that they need not be written again.

    Holds the most recent ones only: forgetting one costs a write that changes nothing.

    >>> seen = SeenPieces(limit=2)
    >>> seen.add([b"1", b"2", b"3"])
    >>> b"3" in seen
    True
    """

    def __init__(self, limit: int = 50_000) -> None:
        self._limit = limit
        self._recent: set[bytes] = set()
        self._older: set[bytes] = set()

    def __contains__(self, digest: bytes) -> bool:
        if digest in self._recent:
            return True
        if digest in self._older:
            self.add([digest])
            return True
        return False

    def add(self, hashes: Iterable[bytes]) -> None:
        self._recent.update(hashes)
        if len(self._recent) >= self._limit:
            self._older, self._recent = self._recent, set()


class Splitter:
    """Takes one value apart; what it found is in `pieces`, without those in `seen`."""

    def __init__(self, seen: SeenPieces) -> None:
        self._seen = seen
        self.pieces: dict[bytes, str | bytes] = {}

    def request(self, request: Mapping[str, Json]) -> tuple[str, str, bytes]:
        """A request body as (JSON without its lists of objects, their lengths as JSON, hashes of their items)."""
        rest: dict[str, Json] = {}
        lengths: dict[str, int] = {}
        hashes: list[bytes] = []
        for name, value in request.items():
            if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
                rest[name] = None
                lengths[name] = len(value)
                hashes.extend(self._item(item) for item in value)
            else:
                rest[name] = value
        return dump_json(rest), dump_json(lengths), b"".join(hashes)

    def tokens(self, tokens: bytes) -> tuple[bytes, bytes]:
        """Token bytes as (hashes of the full blocks, the rest)."""
        full = len(tokens) - len(tokens) % BLOCK_BYTES
        hashes = [self._block(tokens[start : start + BLOCK_BYTES]) for start in range(0, full, BLOCK_BYTES)]
        return b"".join(hashes), tokens[full:]

    def _item(self, item: Json) -> bytes:
        text = dump_json(item)
        return self._keep(blake2b(text.encode(), digest_size=HASH_BYTES).digest(), text)

    def _block(self, block: bytes) -> bytes:
        return self._keep(blake2b(block, digest_size=HASH_BYTES, person=b"tokens").digest(), block)

    def _keep(self, digest: bytes, data: str | bytes) -> bytes:
        if digest not in self._seen:
            self.pieces[digest] = data
        return digest


def hashes_in(references: bytes | None) -> list[bytes]:
    """The single hashes of a column of joined ones."""
    return [] if references is None else [references[i : i + HASH_BYTES] for i in range(0, len(references), HASH_BYTES)]


def join_request(rest: str, lengths: str, references: bytes, pieces: Mapping[bytes, str | bytes]) -> dict[str, Json]:
    """The inverse of `Splitter.request`."""
    request: dict[str, Json] = load_json(rest)
    items = (load_json(_as(str, pieces[digest])) for digest in hashes_in(references))
    for name, length in load_json(lengths).items():
        request[name] = [next(items) for _ in range(length)]
    return request


def join_tokens(references: bytes, tail: bytes, pieces: Mapping[bytes, str | bytes]) -> bytes:
    """The inverse of `Splitter.tokens`."""
    return b"".join([*(_as(bytes, pieces[digest]) for digest in hashes_in(references)), tail])


def _as(kind: type[Kind], data: str | bytes) -> Kind:
    if not isinstance(data, kind):
        raise StoreError(f"The store is damaged: a piece of a call is {type(data).__name__}, not {kind.__name__}.")
    return data
