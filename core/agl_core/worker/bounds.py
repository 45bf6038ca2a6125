"""The size and depth of values as JSON, and how they are cut."""

from __future__ import annotations

import orjson

from agl_core.capture.jsonable import jsonable
from agl_core.types import Json
from agl_core.wire.workers import MAX_DEPTH

MAX_ERROR = 64 << 10
"""Bytes of an attempt's error as JSON."""
LEAST = 96
"""Bytes of JSON that any value can be cut to."""
_NOTE = 48
"""Bytes that the note in a text that was cut takes at most."""


def bounded_text(text: str, most: int, *, from_end: bool = False) -> str:
    """A text cut to `most` bytes of JSON, from its start or its end, with a note of what is left out.

    JSON writes a control character as six bytes. Lone surrogates, which cannot be sent, become question marks.

    >>> bounded_text("a" * 1000, 60)
    'aaaaaaaaaa… (990 more characters)'
    """
    text = text.encode("utf-8", "replace").decode()
    if len(orjson.dumps(text)) <= most:
        return text
    part, room = text, most - _NOTE
    while (size := len(orjson.dumps(part))) > room:
        kept = len(part) * room // size
        part = part[len(part) - kept :] if from_end else part[:kept]
    left_out = len(text) - len(part)
    return f"({left_out} characters before) …{part}" if from_end else f"{part}… ({left_out} more characters)"


def bounded_json(value: Json, most: int) -> Json:
    """A value cut to `most` bytes of JSON, with notes of what is left out; `most` is `LEAST` or more."""
    if isinstance(value, str):
        return bounded_text(value, most)
    less, limit = value, most
    while (size := json_size(less)) is None or size > most:
        less = jsonable(value, limit)
        limit = limit // 2 if size is None else limit * most // size * 15 // 16
    return less


def json_size(value: Json) -> int | None:
    """Bytes of a value as JSON; None if it cannot be sent: it is too deep, or has lone surrogates in it."""
    try:
        encoded = orjson.dumps(value)
    except TypeError:
        return None
    may_be_deep = encoded.count(b"[") + encoded.count(b"{") > MAX_DEPTH
    return None if may_be_deep and depth_of(value) > MAX_DEPTH else len(encoded)


def depth_of(value: Json) -> int:
    """How deep arrays and objects are nested.

    >>> depth_of([1, {"a": []}]), depth_of("[[")
    (3, 0)
    """
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list | tuple)]:
        depth += 1
        level = [child for each in level for child in (each.values() if isinstance(each, dict) else each)]
    return depth
