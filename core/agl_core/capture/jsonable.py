"""Any Python value as JSON of bounded size, for the records of arguments and results of tools."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from pydantic import BaseModel

from agl_core.types import Json

_MAX_DEPTH = 16
_INT64 = 2**63


def jsonable(value: Any, limit: int = 16_384) -> Json:
    """`value` as JSON, about `limit` characters at most; what does not fit is replaced by a note that says so.

    It never raises: a value that is not JSON is kept as its text.

    >>> jsonable({"at": (1, 2), "rate": float("inf")})
    {'at': [1, 2], 'rate': 'inf'}
    >>> jsonable("x" * 20, limit=12)
    'xxxxxxxxxxxx… (8 more characters)'
    """
    try:
        return _Converter(limit).convert(value, 0)
    except Exception as error:
        return f"<{type(value).__name__} that cannot be read: {type(error).__name__}>"


class _Converter:
    def __init__(self, limit: int) -> None:
        self._left = limit

    def convert(self, value: Any, depth: int) -> Json:
        if value is None or isinstance(value, bool):
            self._left -= 5
            return value
        if isinstance(value, int) and -_INT64 <= value < _INT64:
            self._left -= 20
            return int(value)
        if isinstance(value, float) and math.isfinite(value):
            self._left -= 20
            return float(value)
        if isinstance(value, str):
            return self._text(value)
        if depth < _MAX_DEPTH:
            if isinstance(value, BaseModel):
                return self._mapping({name: getattr(value, name) for name in type(value).model_fields}, depth)
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
                return self._mapping(fields, depth)
            if isinstance(value, Mapping):
                return self._mapping(value, depth)
            if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray | memoryview):
                return self._sequence(value, depth)
        return self._text(_text_of(value))

    def _text(self, text: str) -> str:
        # A lone surrogate cannot be encoded, and would fail only when the record is sent.
        text = text.encode("utf-8", "replace").decode()
        room = max(self._left, 0)
        self._left -= len(text) + 2
        return text if len(text) <= room else f"{text[:room]}… ({len(text) - room} more characters)"

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> Json:
        converted: dict[str, Json] = {}
        for place, (key, item) in enumerate(value.items()):
            if self._left <= 0:
                converted["…"] = f"{len(value) - place} more entries"
                break
            name = self._text(key if isinstance(key, str) else _text_of(key))
            converted[name] = self.convert(item, depth + 1)
        return converted

    def _sequence(self, value: Sequence[Any] | Set[Any], depth: int) -> Json:
        converted: list[Json] = []
        for place, item in enumerate(value):
            if self._left <= 0:
                converted.append(f"… ({len(value) - place} more items)")
                break
            converted.append(self.convert(item, depth + 1))
        return converted


def _text_of(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__} that cannot be read: {type(error).__name__}>"
