"""How the fields of records are written, exactly: as JSON that anything can read, and as values of a table's row.

The type of a field says which `Form` its values have. A field that may be None is null in JSON and NULL in a row.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import orjson
from numpy.typing import NDArray

from agl_core.types.records import Json

Record = TypeVar("Record")


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """How one type of value is written."""

    column: Literal["TEXT", "INTEGER", "REAL", "BLOB"] | None
    """Its type in a row; None if it has tables of its own there."""
    dump: Callable[[Any], Any]
    """The value in a row. TypeError or ValueError if it is of another type, or cannot be kept exactly."""
    load: Callable[[Any], Any]
    """The inverse of `dump`."""
    to_json: Callable[[Any], Json]
    from_json: Callable[[Json, str], Any]
    """The inverse of `to_json`. Its second argument is the value's place, which the ValueError of a wrong one names."""


class Field(NamedTuple):
    """One field of a record."""

    name: str
    form: Form
    optional: bool
    """Whether it may be None."""
    has_default: bool


@cache
def fields_of(record: type) -> Mapping[str, Field]:
    """The fields of a dataclass or a NamedTuple, in their order.

    >>> from agl_core.types import Run
    >>> [(field.name, field.form.column, field.optional) for field in fields_of(Run).values()][-2:]
    [('config', 'TEXT', False), ('resumed_step', 'INTEGER', True)]
    """
    defaults = set(getattr(record, "_field_defaults", ()))
    if is_dataclass(record):
        defaults = {f.name for f in fields(record) if (f.default, f.default_factory) != (MISSING, MISSING)}
    described = {}
    for name, hint in get_type_hints(record).items():
        optional = NoneType in get_args(hint)
        [type_] = [part for part in get_args(hint) if part is not NoneType] if optional else [hint]
        described[name] = Field(name, _form(type_), optional, name in defaults)
    return described


def to_json(record: Any) -> dict[str, Json]:
    """A record or an episode as JSON: its fields by name, arrays as lists.

    Numbers that JSON lacks are the texts "nan", "inf" and "-inf". In an agent's own values (a result, an argument) they
    become null, and tuples become lists, as in the store.

    >>> from agl_core.types import Reward
    >>> to_json(Reward("r", 0, "right", 1.0, "rule"))["value"]
    1.0
    """
    values = ((field, getattr(record, field.name)) for field in fields_of(type(record)).values())  # type: ignore[arg-type]
    return {field.name: None if value is None else field.form.to_json(value) for field, value in values}


def from_json(record: type[Record], data: Json, place: str = "") -> Record:
    """The inverse of `to_json`; fields with a default may be absent. ValueError names the place of what is wrong.

    >>> from agl_core.types import Reward
    >>> from_json(Reward, {"rollout": "r", "attempt": 0, "name": "right", "value": 1, "source": "rule"}).value
    1.0
    """
    if not isinstance(data, dict):
        raise _wrong(place, f"an object ({record.__name__})", data)
    known, values = fields_of(record), {}  # type: ignore[arg-type]  # mypy takes no class as hashable
    for name in data.keys() - known.keys():
        raise ValueError(f"{place or record.__name__} has no field '{name}'")
    for name, field in known.items():
        if name not in data and not field.has_default:
            raise ValueError(f"{place or record.__name__} lacks the field '{name}'")
    for name, value in data.items():
        _, form, optional, _ = known[name]
        values[name] = None if value is None and optional else form.from_json(value, f"{place}.{name}".lstrip("."))
    return record(**values)


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


def _unchanged(value: Any) -> Any:
    return value


def _wrong(place: str, expected: str, data: Json) -> ValueError:
    return ValueError(f"{place or 'it'} must be {expected}, not {data!r:.60}")


def _exactly(type_: type, named: str) -> Callable[[Json, str], Any]:
    def from_json(data: Json, place: str) -> Any:
        if type(data) is not type_:
            raise _wrong(place, named, data)
        return data

    return from_json


def _dump_text(value: str) -> str | bytes:
    if not value.isascii():  # What a model, a tool or an exception wrote may hold lone surrogates, which are no UTF-8.
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-8", "surrogatepass")
    return value


def _load_text(value: str | bytes) -> str:
    return value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else value


def _dump_float(value: float) -> float | str:
    number = float(value)
    return number if number == number else "nan"  # SQLite would make it NULL


def _float_to_json(value: float) -> Json:
    return float(value) if math.isfinite(value) else str(float(value))


def _float_from_json(data: Json, place: str) -> float:
    if type(data) not in (int, float) and data not in ("nan", "inf", "-inf"):
        raise _wrong(place, "a number", data)
    return float(data)


_FORMS: Mapping[Any, Form] = {
    str: Form("TEXT", _dump_text, _load_text, _unchanged, _exactly(str, "a text")),
    int: Form("INTEGER", operator.index, _unchanged, _unchanged, _exactly(int, "an integer")),
    bool: Form("INTEGER", int, bool, _unchanged, _exactly(bool, "true or false")),
    float: Form("REAL", _dump_float, float, _float_to_json, _float_from_json),
    Any: Form("TEXT", dump_json, load_json, _freely, lambda data, place: data),
    Mapping[str, Json]: Form("TEXT", dump_json, load_json, _freely, _exactly(dict, "an object")),
}


@cache
def _form(hint: Any) -> Form:
    if hint in _FORMS:
        return _FORMS[hint]
    if get_origin(hint) is np.ndarray:
        return _array(np.dtype(get_args(get_args(hint)[1])[0]))
    if get_origin(hint) is tuple:
        return _tuple(_form(get_args(hint)[0]))
    return _enum(hint) if issubclass(hint, Enum) else _record(hint)


def _enum(hint: type[Enum]) -> Form:
    def from_json(data: Json, place: str) -> Enum:
        try:
            return hint(data)
        except ValueError:
            raise _wrong(place, f"one of {', '.join(str(member.value) for member in hint)}", data) from None

    value = operator.attrgetter("value")
    return Form("TEXT", value, hint, value, from_json)


def _record(hint: type) -> Form:
    """A record within a record. In a row it is JSON, without the fields that are None by default."""
    known = tuple(fields_of(hint).values())

    def dump(record: Any) -> str:
        values = {}
        for name, form, _, has_default in known:
            value = getattr(record, name)
            if value is None and has_default:
                continue
            if form is _FORMS[float] and not math.isfinite(value):  # JSON has no such number, and null is another
                raise ValueError(f"{name} is {value}; give a finite number, or None")
            values[name] = value
        return dump_json(values)

    return Form(
        *("TEXT", dump, lambda text: hint(**load_json(text))),
        *(to_json, lambda data, place: from_json(hint, data, place)),
    )


def _tuple(of: Form) -> Form:
    def from_json(data: Json, place: str) -> tuple[Any, ...]:
        if not isinstance(data, list):
            raise _wrong(place, "a list", data)
        return tuple(of.from_json(item, f"{place}[{n}]") for n, item in enumerate(data))

    return Form(None, _unchanged, _unchanged, lambda value: [of.to_json(item) for item in value], from_json)


def _array(dtype: np.dtype[Any]) -> Form:
    """An array with one axis: token ids (int32), log-probabilities (float32) or a mask (bool).

    In a row it is little-endian bytes. What is read is read-only.
    """
    element = _FORMS[{"i": int, "f": float, "b": bool}[dtype.kind]]
    in_row = dtype.newbyteorder("<")

    def dump(array: NDArray[Any]) -> bytes:
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            actual = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise ValueError(f"it must be a numpy array of {dtype} with one axis, not {actual}; convert before")
        return array.astype(in_row, copy=False).tobytes()

    def load(data: bytes) -> NDArray[Any]:
        return np.frombuffer(data, in_row).astype(dtype, copy=False)

    def from_json(data: Json, place: str) -> NDArray[Any]:
        try:
            return np.array(_tuple(element).from_json(data, place), dtype)
        except OverflowError as error:
            raise ValueError(f"{place}: {error}") from error

    return Form("BLOB", dump, load, lambda array: [element.to_json(item) for item in array.tolist()], from_json)
