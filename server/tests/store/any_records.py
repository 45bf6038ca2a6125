"""Any record that there can be, for hypothesis: each field as its type says; calls by their ids; exact comparison."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import strategies as st

from agl_core.testing import episodes as make
from agl_core.types import AttemptKey, Call, Json, Sampling
from agl_server.store.sqlite import SqliteStore

any_text = st.text(st.characters(exclude_categories=()), max_size=8)
"""Lone surrogates and NUL included: models and exceptions produce them."""
key_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
whole = st.integers(0, 2**40)
finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=8,
)
json_objects = st.dictionaries(any_text, json_values, max_size=4)
requests = st.builds(
    lambda plain, lists: {**plain, **lists},
    json_objects,
    st.dictionaries(
        st.sampled_from(["messages", "tools", "input"]),
        st.builds(lambda first, rest: [first, *rest], json_objects, st.lists(json_values, max_size=3)),
    ),
)
_OF_TYPES: Mapping[Any, st.SearchStrategy[Any]] = {
    str: key_text,
    int: whole,
    bool: st.booleans(),
    float: st.floats(),
    Any: json_values,
    Mapping[str, Json]: json_objects,
}


@cache
def records(type_: type) -> st.SearchStrategy[Any]:
    """Records, or episodes, of this type."""
    if type_ is Sampling:
        return st.builds(Sampling, *[st.none() | finite] * 2, *[st.none() | whole] * 2)
    own = {"request": requests, "error": st.none() | any_text, "parse_error": st.none() | any_text, "tool": any_text}
    hints = get_type_hints(type_)
    return st.builds(type_, **{name: own[name] if name in own else _of(hint) for name, hint in hints.items()})


def _of(hint: Any) -> st.SearchStrategy[Any]:
    if hint in _OF_TYPES:
        return _OF_TYPES[hint]
    if NoneType in get_args(hint):
        [some] = [part for part in get_args(hint) if part is not NoneType]
        return st.none() | _of(some)
    if get_origin(hint) is tuple:
        return st.lists(_of(get_args(hint)[0]), max_size=2).map(tuple)
    if get_origin(hint) is np.ndarray:
        return _arrays(np.dtype(get_args(get_args(hint)[1])[0]))
    return st.sampled_from(hint) if issubclass(hint, Enum) else records(hint)


def _arrays(dtype: np.dtype[Any]) -> st.SearchStrategy[Any]:
    """Arrays of any bits, drawn as a length and a seed: element by element would take long."""
    lengths = st.integers(0, 20) | st.sampled_from([255, 256, 257, 512, 1100])
    data = st.builds(lambda n, seed: np.random.default_rng(seed).bytes(4 * n), lengths, st.integers(0, 9))
    if dtype == np.bool_:
        return data.map(lambda bits: np.frombuffer(bits, np.uint8) > 99)
    return data.map(lambda bits: np.frombuffer(bits, dtype))


def make_call(id: str, rollout: str = "r", **changes: Any) -> Call:
    fields = {"request": {"model": "default", "messages": [{"role": "user", "content": id}]}, **changes}
    return make.call(rollout=rollout, id=id, **fields)


async def calls_of(store: SqliteStore, *rollouts: str) -> dict[str, Call]:
    return {call.id: call for call in await store.calls([AttemptKey(rollout, 0) for rollout in rollouts])}


def exactly(value: Any) -> str:
    """The same for equal records only: types of arrays and numbers, signs of zeros, order of keys."""
    return json.dumps(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), value.tolist()]
    if dataclasses.is_dataclass(value):
        return [type(value).__name__, *(_plain(getattr(value, field.name)) for field in dataclasses.fields(value))]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
