"""How records are written, exactly: as JSON, for disk, wire, export and pages.

The type of a field says which `Kind` of value it holds. For export and pages a record is JSON alone, with all of its
fields. For the store its arrays are bytes beside the JSON, and a field that has its default is absent.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import orjson
from numpy.typing import NDArray

from agl_core.types.records import Json

Record = TypeVar("Record")


class Kind(NamedTuple):
    """One kind of value."""

    plain: type | None
    """Values of exactly this type are JSON as they are."""
    to_json: Callable[[Any, bytearray | None], Json]
    """TypeError or ValueError if the value is of another kind. Arrays are added to the bytes, if these are given."""
    from_json: Callable[[Json, bytes | None], Any]
    """The inverse. The ValueError of what is wrong begins with the path to it inside the value, or with a space."""


class Field(NamedTuple):
    """One field of a record."""

    name: str
    plain: type | None
    to_json: Callable[[Any, bytearray | None], Json]
    from_json: Callable[[Json, bytes | None], Any]
    """These three are of its kind."""
    optional: bool
    """Whether it may be None."""
    default: Any
    """The default, or what makes it; `MISSING` if there is none."""


@cache
def fields_of(record: type) -> Mapping[str, Field]:
    """The fields of a dataclass or a NamedTuple, in their order.

    >>> from agl_core.types import Run
    >>> [(each.name, each.optional, each.default) for each in fields_of(Run).values()][-1:]
    [('resumed_step', True, None)]
    """
    defaults = dict(getattr(record, "_field_defaults", {}))
    if is_dataclass(record):
        defaults = {e.name: e.default if e.default_factory is MISSING else e.default_factory for e in fields(record)}
    known = {}
    for name, hint in get_type_hints(record).items():
        optional = NoneType in get_args(hint)
        [of] = [each for each in get_args(hint) if each is not NoneType] if optional else [hint]
        known[name] = Field(name, *_kind(of), optional, defaults.get(name, MISSING))
    return known


def to_json(record: Any) -> dict[str, Json]:
    """A record or an episode as JSON: its fields by name, arrays as lists.

    Numbers that JSON lacks are the texts "nan", "inf" and "-inf". In an agent's own values (a result, an argument) they
    become null, and tuples become lists, as in the store.

    >>> from agl_core.types import Reward
    >>> to_json(Reward("r", 0, "right", 1.0, "rule"))["value"]
    1.0
    """
    return values_of(record, fields_of(type(record)).values(), None)  # type: ignore[arg-type]


def values_of(record: Any, fields: Iterable[Field], arrays: bytearray | None) -> dict[str, Json]:
    """These fields of the record, by name; with `arrays`, to which its arrays are added, only what is no default.

    >>> from agl_core.types import Choice, FinishReason
    >>> arrays = bytearray()
    >>> choice = Choice(0, {}, FinishReason.STOP, np.array([5, 6], np.int32))
    >>> values_of(choice, fields_of(Choice).values(), arrays), len(arrays)
    ({'index': 0, 'message': {}, 'finish_reason': 'stop', 'response_ids': [0, 2]}, 8)
    """
    values = {}
    for name, plain, to_json, _, optional, default in fields:
        value = getattr(record, name)
        if value is default and arrays is not None:
            continue
        is_plain = type(value) is plain or (value is None and optional)
        values[name] = value if is_plain else to_json(value, arrays)
    return values


def from_json(record: type[Record], data: Json, arrays: bytes | None = None) -> Record:
    """The inverse of `to_json`, or with `arrays` of `values_of`; fields with a default may be absent.

    ValueError names the place of what is wrong.

    >>> from agl_core.types import Reward
    >>> from_json(Reward, {"rollout": "r", "attempt": 0, "name": "right", "value": 1, "source": "rule"}).value
    1.0
    """
    try:
        return _from_json(record, data, arrays)
    except ValueError as error:
        subject = "it" if not isinstance(data, dict) else record.__name__
        text = str(error)
        raise ValueError(text[1:] if text[:1] == "." else f"{subject}{text}") from error


def _from_json(record: type[Record], data: Json, arrays: bytes | None) -> Record:
    if not isinstance(data, dict):
        raise _wrong(f"an object ({record.__name__})", data)
    known, values = fields_of(record), {}  # type: ignore[arg-type]  # mypy takes no class as hashable
    for name in _required(record):  # type: ignore[arg-type]
        if name not in data:
            raise ValueError(f" lacks the field '{name}'")
    for name, value in data.items():
        if name not in known:
            raise ValueError(f" has no field '{name}'")
        _, plain, _, read, optional, _ = known[name]
        try:
            is_plain = type(value) is plain or (value is None and optional)
            values[name] = value if is_plain else read(value, arrays)
        except ValueError as error:
            raise ValueError(f".{name}{error}") from error
    return record(**values)


@cache
def _required(record: type) -> tuple[str, ...]:
    return tuple(name for name, field in fields_of(record).items() if field.default is MISSING)


def dump_json(value: Json) -> str:
    """A JSON value as text. Tuples become lists; NaN and infinity, which JSON does not have, become null.

    What orjson cannot express (integers beyond 64 bits, lone surrogates, keys that are not strings) is written
    by the standard library, and marked by a leading space: orjson would also read it wrongly.

    >>> dump_json({"a": [1, 2]}), dump_json(2**70)
    ('{"a":[1,2]}', ' 1180591620717411303424')
    """
    try:
        return orjson.dumps(value, _as_dict).decode()
    except TypeError:
        pass
    try:
        return " " + json.dumps(value, default=_as_dict, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error}); use None, bool, int, float, str, list and dict") from error


def load_json(text: str) -> Json:
    """The inverse of `dump_json`."""
    return json.loads(text, parse_constant=lambda _: None) if text[:1] == " " else orjson.loads(text)


def _as_dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _freely(value: Any) -> Json:
    if isinstance(value, Mapping):
        return {key: _freely(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_freely(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _wrong(wanted: str, data: Json) -> ValueError:
    return ValueError(f" must be {wanted}, not {data!r:.60}")


def _any_to_json(value: Any, arrays: bytearray | None) -> Json:
    return _freely(value) if arrays is None else value  # the store's `dump_json` does the same


def _float_to_json(value: float, arrays: bytearray | None) -> Json:
    return float(value) if math.isfinite(value) else str(float(value))


def _float_from_json(data: Json, arrays: bytes | None) -> float:
    if type(data) not in (int, float) and data not in ("nan", "inf", "-inf"):
        raise _wrong("a number", data)
    return float(data)


def _plain(kind: type, named: str, to_json: Callable[[Any], Any]) -> Kind:
    def from_json(data: Json, arrays: bytes | None) -> Any:
        raise _wrong(named, data)

    return Kind(kind, lambda value, arrays: to_json(value), from_json)


def _object_from_json(data: Json, arrays: bytes | None) -> dict[str, Json]:
    if not isinstance(data, dict):
        raise _wrong("an object", data)
    return data


_KINDS: Mapping[Any, Kind] = {
    str: _plain(str, "a text", str.__str__),
    int: _plain(int, "an integer", operator.index),
    bool: _plain(bool, "true or false", bool),
    float: Kind(None, _float_to_json, _float_from_json),
    Any: Kind(None, _any_to_json, lambda data, arrays: data),
    Mapping[str, Json]: Kind(None, _any_to_json, _object_from_json),
}


@cache
def _kind(hint: Any) -> Kind:
    if hint in _KINDS:
        return _KINDS[hint]
    if get_origin(hint) is np.ndarray:
        return _array(np.dtype(get_args(get_args(hint)[1])[0]))
    if get_origin(hint) is tuple:
        return _list(_kind(get_args(hint)[0]))
    return _enum(hint) if issubclass(hint, Enum) else _record(hint)


def _enum(hint: type[Enum]) -> Kind:
    members = {member.value: member for member in hint}

    def from_json(data: Json, arrays: bytes | None) -> Enum:
        if not isinstance(data, str) or data not in members:
            raise _wrong(f"one of {', '.join(members)}", data)
        return members[data]

    return Kind(None, lambda value, arrays: value.value, from_json)


def _record(hint: type) -> Kind:
    return Kind(
        None,
        lambda value, arrays: values_of(value, fields_of(hint).values(), arrays),
        lambda data, arrays: _from_json(hint, data, arrays),
    )


def _list(of: Kind) -> Kind:
    def to_json(value: Iterable[Any], arrays: bytearray | None) -> Json:
        return [item if type(item) is of.plain else of.to_json(item, arrays) for item in value]

    def from_json(data: Json, arrays: bytes | None) -> tuple[Any, ...]:
        if not isinstance(data, list):
            raise _wrong("a list", data)
        items = []
        for place, item in enumerate(data):
            try:
                items.append(item if type(item) is of.plain else of.from_json(item, arrays))
            except ValueError as error:
                raise ValueError(f"[{place}]{error}") from error
        return tuple(items)

    return Kind(None, to_json, from_json)


def _array(dtype: np.dtype[Any]) -> Kind:
    """An array with one axis: token ids (int32), log-probabilities (float32) or a mask (bool).

    Beside JSON it is little-endian bytes, of a mask eight values per byte; in its place are where these begin and how
    many values it has. What is read is read-only.
    """
    element = _KINDS[{"i": int, "f": float, "b": bool}[dtype.kind]]
    values = _list(element)
    beside, is_mask = dtype.newbyteorder("<"), dtype.kind == "b"

    def to_json(array: NDArray[Any], arrays: bytearray | None) -> Json:
        if arrays is None:
            return values.to_json(array.tolist(), None)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            named = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise ValueError(f"it must be a numpy array of {dtype} with one axis, not {named}; convert before")
        start = len(arrays)
        arrays += (np.packbits(array) if is_mask else array.astype(beside, copy=False)).tobytes()
        return [start, len(array)]

    def from_json(data: Json, arrays: bytes | None) -> NDArray[Any]:
        if arrays is None:
            try:
                return np.array(values.from_json(data, None), dtype)
            except OverflowError as error:
                raise ValueError(f": {error}") from error
        start, count = data
        if is_mask:
            bits = np.frombuffer(arrays, np.uint8, (count + 7) // 8, start)
            return np.unpackbits(bits, count=count).view(np.bool_)
        return np.frombuffer(arrays[start : start + count * beside.itemsize], beside).astype(dtype, copy=False)

    return Kind(None, to_json, from_json)
