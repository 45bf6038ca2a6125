"""Single values as SQLite keeps them: JSON as text, arrays as little-endian bytes, and floats that may be NaN."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from typing import Any, overload

import numpy as np
import orjson
from numpy.typing import NDArray

from agl_core.types import Json, Logprobs, TokenMask, Tokens


class UnstorableError(ValueError):
    """A value that the store cannot keep exactly; the message says what and what to do."""


def dump_json(value: Json) -> str:
    """A JSON value as text. Tuples become lists; NaN and infinity, which JSON does not have, become null.

    What orjson cannot express (integers beyond 64 bits, lone surrogates, keys that are not strings) is written
    by the standard library, and marked by a leading space: orjson would also read it wrongly.

    >>> dump_json({"a": [1, 2]}), dump_json(2**70)
    ('{"a":[1,2]}', ' 1180591620717411303424')
    """
    try:
        return orjson.dumps(value, _plain).decode()
    except TypeError:
        pass
    try:
        return " " + json.dumps(value, default=_plain, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UnstorableError(f"it is not JSON ({error}); use None, bool, int, float, str, list and dict") from error


def load_json(text: str) -> Json:
    """The inverse of `dump_json`."""
    return json.loads(text, parse_constant=lambda _: None) if text[:1] == " " else orjson.loads(text)


def dump_ids(ids: Tokens | None) -> bytes | None:
    """Token ids as little-endian int32."""
    return None if ids is None else _dump_array(ids, np.dtype(np.int32), "token ids")


def load_ids(data: bytes | None) -> Tokens | None:
    """The inverse of `dump_ids`; the array is read-only."""
    return None if data is None else np.frombuffer(data, "<i4").astype(np.int32, copy=False)


def dump_logprobs(logprobs: Logprobs | None) -> bytes | None:
    """Log-probabilities as little-endian float32, NaN and infinities included."""
    return None if logprobs is None else _dump_array(logprobs, np.dtype(np.float32), "log-probabilities")


def load_logprobs(data: bytes | None) -> Logprobs | None:
    """The inverse of `dump_logprobs`; the array is read-only."""
    return None if data is None else np.frombuffer(data, "<f4").astype(np.float32, copy=False)


def dump_mask(mask: TokenMask | None) -> bytes | None:
    """A mask as one byte with the number of unused bits at the end, then eight values per byte."""
    if mask is None:
        return None
    _check_array(mask, np.dtype(np.bool_), "a mask")
    return bytes((-len(mask) % 8,)) + np.packbits(mask).tobytes()


def load_mask(data: bytes | None) -> TokenMask | None:
    """The inverse of `dump_mask`."""
    if data is None:
        return None
    count = (len(data) - 1) * 8 - data[0]
    return np.unpackbits(np.frombuffer(data, np.uint8, offset=1), count=count).astype(np.bool_)


def dump_float(value: float | None) -> float | str | None:
    """A float that may be NaN, which SQLite would make NULL."""
    if value is None:
        return None
    return float(value) if value == value else "nan"


def load_float(value: float | str | None) -> float | None:
    """The inverse of `dump_float`."""
    return None if value is None else float(value)


@overload
def dump_int(value: int) -> int: ...
@overload
def dump_int(value: int | None) -> int | None: ...
def dump_int(value: int | None) -> int | None:
    """An integer, numpy's included."""
    return None if value is None else operator.index(value)


def dump_key(value: str) -> str:
    """The id of a rollout, by which SQLite looks up with its JSON functions: those end a text at a NUL."""
    if "\0" in value:
        raise UnstorableError(f"the id {value!r} contains a NUL character; leave it out")
    return value


def dump_text(value: str | None) -> str | bytes | None:
    """Free text, which may hold lone surrogates (a model's or an exception's): those are not UTF-8."""
    if value is None or value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")
    return value


def load_text(value: str | bytes | None) -> str | None:
    """The inverse of `dump_text`."""
    return value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else value


def _dump_array(array: NDArray[Any], dtype: np.dtype[Any], what: str) -> bytes:
    _check_array(array, dtype, what)
    return array.astype(dtype.newbyteorder("<"), copy=False).tobytes()


def _check_array(array: NDArray[Any], dtype: np.dtype[Any], what: str) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise UnstorableError(f"{what} must be a numpy array of {dtype} with one axis, not {found}; convert before")


def _plain(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
