"""Splitting many records into requests that the server can take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias
from uuid import uuid4

from pydantic import BaseModel

from agl_core.store.interface import Record
from agl_core.store.packing import pack
from agl_core.types import Rollout
from agl_core.wire import trainers as wire
from agl_core.wire.operation import Operation

LARGE = 8 << 20
"""Bytes of records in one request, unless one record has more: the server does nothing else while it reads them."""

Chunk: TypeAlias = tuple[Operation[Any, Any], BaseModel]


def enqueuing(rollouts: Sequence[Rollout]) -> Iterator[Chunk]:
    """The requests that add these rollouts, in order."""
    for part in _packed(list(rollouts)):
        yield wire.ENQUEUE, wire.EnqueueRequest.model_construct(rollouts=part)


def putting(records: Iterable[Record], restart: int | None) -> Iterator[Chunk]:
    """The requests that write these records, all or none: one, or several, of which the last commits them all."""
    parts = _packed(list(records))
    first, second = next(parts), next(parts, None)
    if second is None:
        yield wire.PUT, wire.PutRequest.model_construct(records=first, restart=restart)
        return
    put, count = uuid4().hex, 0
    for part in (first, second, *parts):
        yield wire.PUT_PART, wire.RecordsPart.model_construct(put=put, number=count, records=part, restart=restart)
        count += 1
    yield wire.WRITE_PARTS, wire.PartsRequest(put=put, count=count, restart=restart)


def _packed(records: Sequence[Record]) -> Iterator[wire.PackedRecords]:
    """Equal parts, at least one, of which none should be too large."""
    packed = pack(records)
    size = len(packed.model_dump_json())
    if size <= LARGE or len(records) < 2:
        yield packed
        return
    del packed
    length = max(len(records) * LARGE // size, 1)
    for start in range(0, len(records), length):
        yield from _packed(records[start : start + length])
