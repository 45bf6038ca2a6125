"""Records as JSON that anything can read, exactly, as the store keeps them too: a field's type decides its `Form`."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import orjson
from numpy.typing import NDArray

from agl_core.types.records import Json

Record = TypeVar("Record")
_SURROGATES = re.compile(
    r"\\u(?:[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|([dD][89a-fA-F][0-9a-fA-F]{2}))"
)
"""An escaped surrogate pair; in its group, half of one."""
_MAX_SURROGATES, _MAX_BACKSLASHES = 100_000, 1000
"""Escaped surrogates read in one text, and backslashes before each: more are no client's mistake."""
_LONG = 32 << 10
_MAX_WRITABLE_DEPTH = 250
"""Levels of nesting that orjson always writes."""
_PIECE = 1 << 20
"""Bytes of JSON counted at once, which takes as many more."""


class Form(NamedTuple):
    """How values of one type, or of one field, are written."""

    dump: Callable[[Any], Json]
    """TypeError or ValueError if the value is of another type, or cannot be kept exactly."""
    load: Callable[[Json, str], Any]
    """The inverse of `dump`. Its second argument is the value's place, which the ValueError of a wrong one names."""
    optional: bool = False
    """True for a field that may be None, which is null in JSON."""
    has_default: bool = False


@cache
def fields_of(record: type) -> Mapping[str, Form]:
    """The fields of a dataclass or a NamedTuple by name, in their order."""
    defaults = set(getattr(record, "_field_defaults", ()))
    if is_dataclass(record):
        defaults = {f.name for f in fields(record) if (f.default, f.default_factory) != (MISSING, MISSING)}
    forms = {}
    for name, hint in get_type_hints(record).items():
        optional = NoneType in get_args(hint)
        [type_] = [part for part in get_args(hint) if part is not NoneType] if optional else [hint]
        forms[name] = _form(type_)._replace(optional=optional, has_default=name in defaults)
    return forms


def to_json(record: Any, apart: Collection[str] = (), *, brief: bool = False) -> dict[str, Json]:
    """A record or an episode as JSON: its fields by name but those `apart`, arrays as lists.

    `brief` leaves out what is None by default. Numbers that JSON lacks are the texts "nan", "inf" and "-inf". An
    agent's own values (a result, an argument) are as they were: `dump_json` makes JSON of those. ValueError names a
    field that cannot be kept exactly.

    >>> from agl_core.types import Reward
    >>> to_json(Reward("r", 0, "right", 1.0, "rule"), brief=True)
    {'rollout': 'r', 'attempt': 0, 'name': 'right', 'value': 1.0, 'source': 'rule', 'choice': 0}
    """
    values: dict[str, Json] = {}
    for name, (dump, _, optional, has_default) in fields_of(type(record)).items():  # type: ignore[arg-type]
        if name in apart:
            continue
        value = getattr(record, name)
        if value is not None or not optional:
            try:
                values[name] = dump(value)
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(f"{name}: {error}") from error
        elif not (brief and has_default):
            values[name] = None
    return values


def from_json(record: type[Record], data: Json, place: str = "", /, **given: Any) -> Record:
    """The inverse of `to_json`; fields with a default may be absent. ValueError names the place of what is wrong.

    `given` has the fields that stood apart.

    >>> from agl_core.types import Reward
    >>> from_json(Reward, {"rollout": "r", "attempt": 0, "name": "right", "value": 1, "source": "rule"}).value
    1.0
    """
    if not isinstance(data, dict):
        raise _wrong(place, f"an object ({record.__name__})", data)
    known, values = fields_of(record), given  # type: ignore[arg-type]  # mypy takes no class as hashable
    for name in data.keys() - known.keys():
        raise ValueError(f"{place or record.__name__} has no field '{name}'")
    for name, field in known.items():
        if not field.has_default and name not in data and name not in given:
            raise ValueError(f"{place or record.__name__} lacks the field '{name}'")
    for name, value in data.items():
        _, load, optional, _ = known[name]
        values[name] = None if value is None and optional else load(value, f"{place}.{name}" if place else name)
    return record(**values)


def dump_json(value: Json) -> str:
    """A JSON value as text. Tuples become lists; NaN and infinity, which JSON does not have, become null.

    The standard library writes values that orjson cannot express (integers beyond 64 bits, lone surrogates, keys that
    are not strings), marked by a leading space: orjson would also read it wrongly.

    >>> dump_json({"a": [1, 2]}), dump_json(2**70)
    ('{"a":[1,2]}', ' 1180591620717411303424')
    """
    try:
        return orjson.dumps(value, _as_dict).decode()
    except TypeError:
        pass
    try:
        return " " + json.dumps(_strictly(value), separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error}); use None, bool, int, float, str, list and dict") from error


def load_json(text: str) -> Json:
    """The inverse of `dump_json`."""
    return json.loads(text) if text[:1] == " " else orjson.loads(text)


def without_halves(text: str) -> str:
    r"""JSON text in which half of a surrogate pair is U+FFFD: clients and models write halves, which cannot be encoded.

    >>> without_halves(r'["\ud83c\udf0d", "\ud83c!", "\\ud83c"]')
    '["\\ud83c\\udf0d", "\\ufffd!", "\\\\ud83c"]'
    """
    return _SURROGATES.sub(_without_half, text, _MAX_SURROGATES)


def _without_half(escape: re.Match[str]) -> str:
    before = escape.string[max(0, escape.start() - _MAX_BACKSLASHES) : escape.start()]
    if (len(before) - len(before.rstrip("\\"))) % 2:  # Its backslash is itself escaped: the first half is plain text.
        return escape[0] if escape[1] else escape[0][:6] + r"\ufffd"
    return r"\ufffd" if escape[1] else escape[0]


def parse_json(text: bytes | bytearray | str) -> Any:
    """JSON of elsewhere as a value that orjson can write; orjson.JSONDecodeError if there is none.

    Half of a surrogate pair is U+FFFD, an integer of more than 64 bits is a float, and the last of equal keys counts.
    NaN, infinity and values too deep to be written again are refused.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        whole = without_halves(text if isinstance(text, str) else text.decode(errors="surrogateescape"))
        value = orjson.loads(whole)
    braces, brackets = ("{", "[") if isinstance(text, str) else (b"{", b"[")
    # Counting takes longer than writing where most of a long text are strings.
    if len(text) > _LONG or text.count(braces) + text.count(brackets) > _MAX_WRITABLE_DEPTH:  # type: ignore[arg-type]
        try:
            orjson.dumps(value)
        except orjson.JSONEncodeError as error:
            raise orjson.JSONDecodeError(f"nested too deeply ({error})", "", 0) from None
    return value


def count_values(text: bytes, limit: int) -> int:
    """At most how many values JSON text has; exact above `limit`, where punctuation in strings is not counted.

    >>> count_values(b'[1, {"a,b": 2}]', 10), count_values(b'[1, {"a,b": 2}]', 3)
    (4, 3)
    """
    most = sum(int(np.count_nonzero(_separators(piece))) for piece in _pieces(text))
    if most <= limit:
        return most
    count, odd = 0, 0
    for piece in _pieces(text.replace(b"\\\\", b"").replace(b'\\"', b"")):
        quotes = np.cumsum(piece == ord('"'), dtype=np.uint8) + np.uint8(odd)
        count += int(np.count_nonzero(_separators(piece) & (quotes % 2 == 0)))
        odd = int(quotes[-1]) % 2
    return count


def _pieces(text: bytes) -> Iterator[NDArray[np.uint8]]:
    whole = np.frombuffer(text, np.uint8)
    return (whole[start : start + _PIECE] for start in range(0, len(whole), _PIECE))


def _separators(text: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """The places at which values begin: commas, braces and brackets."""
    separators: NDArray[np.bool_] = (text == ord(",")) | (text | np.uint8(32) == ord("{"))
    return separators


def parse_if_json(value: Json) -> Json:
    """A value that may be written as JSON text; text that is not JSON stays text.

    >>> parse_if_json('{"a": 1}'), parse_if_json("a: 1")
    ({'a': 1}, 'a: 1')
    """
    try:
        return parse_json(value) if isinstance(value, str) else value
    except orjson.JSONDecodeError:
        return value


def _as_dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _strictly(value: Any) -> Json:
    if isinstance(value, Mapping):
        return {key: _strictly(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strictly(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _wrong(place: str, expected: str, data: Json) -> ValueError:
    return ValueError(f"{place or 'it'} must be {expected}, not {data!r:.60}")


def _exactly(type_: type, named: str) -> Callable[[Json, str], Any]:
    def load(data: Json, place: str) -> Any:
        if type(data) is not type_:
            raise _wrong(place, named, data)
        return data

    return load


def _dump_text(value: str) -> str:
    if not isinstance(value, str):
        raise _wrong("", "a text", value)
    return value


def _dump_float(value: float) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _load_float(data: Json, place: str) -> float:
    if type(data) not in (int, float) and data not in ("nan", "inf", "-inf"):
        raise _wrong(place, "a number", data)
    return float(data)


_FORMS: Mapping[Any, Form] = {
    str: Form(_dump_text, _exactly(str, "a text")),
    int: Form(operator.index, _exactly(int, "an integer")),
    bool: Form(bool, _exactly(bool, "true or false")),
    float: Form(_dump_float, _load_float),
    Any: Form(lambda value: value, lambda data, place: data),
    Mapping[str, Json]: Form(lambda value: value, _exactly(dict, "an object")),
}


@cache
def _form(hint: Any) -> Form:
    if hint in _FORMS:
        return _FORMS[hint]
    if get_origin(hint) is np.ndarray:
        return _array(np.dtype(get_args(get_args(hint)[1])[0]))
    if get_origin(hint) is tuple:
        return _tuple(_form(get_args(hint)[0]))
    return _enum(hint) if issubclass(hint, Enum) else Form(to_json, partial(from_json, hint))


def _enum(hint: type[Enum]) -> Form:
    def load(data: Json, place: str) -> Enum:
        try:
            return hint(data)
        except ValueError:
            raise _wrong(place, f"one of {', '.join(str(member.value) for member in hint)}", data) from None

    return Form(operator.attrgetter("value"), load)


def _tuple(of: Form) -> Form:
    def load(data: Json, place: str) -> tuple[Any, ...]:
        if not isinstance(data, list):
            raise _wrong(place, "a list", data)
        return tuple(of.load(item, f"{place}[{n}]") for n, item in enumerate(data))

    return Form(lambda value: [of.dump(item) for item in value], load)


def _array(dtype: np.dtype[Any]) -> Form:
    """An array with one axis: token ids (int32), log-probabilities (float32) or a mask (bool)."""
    elements = _tuple(_FORMS[{"i": int, "f": float, "b": bool}[dtype.kind]])

    def load(data: Json, place: str) -> NDArray[Any]:
        try:
            return np.array(elements.load(data, place), dtype)
        except OverflowError as error:
            raise ValueError(f"{place}: {error}") from error

    return Form(lambda array: elements.dump(array.tolist()), load)


def jsonable(value: Any, limit: int = 16_384) -> Json:
    """`value` as JSON, a longer one than `limit` bytes as a text that is cut, with a note; it never raises.

    >>> jsonable({"at": (1, 2), "who": {"Ann"}})
    {'at': [1, 2], 'who': ['Ann']}
    >>> jsonable("x" * 20, limit=12)
    'xxxxxxxxxxxx… (8 more characters)'
    """
    if isinstance(value, str):
        return _cut(value, limit)
    try:
        encoded = orjson.dumps(value, _plain, orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except Exception:  # It contains itself, a number of more than 64 bits, …
        return _cut(text_of(value), limit)
    return orjson.loads(encoded) if len(encoded) <= limit else _cut(encoded.decode(), limit)


def _plain(value: Any) -> Any:
    """A value that stands for one that is not JSON itself."""
    if (names := getattr(type(value), "model_fields", None)) is not None:  # a pydantic model
        return {name: getattr(value, name) for name in names}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    return text_of(value)


def text_of(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__} that cannot be read: {type(error).__name__}>"


def _cut(text: str, limit: int) -> str:
    # A lone surrogate cannot be encoded, and would fail only when the record is sent.
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters)"
