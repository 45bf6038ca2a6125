"""The state of the MDP: the agent's semantic variables, which travel with each call in a header of bounded size."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from typing import Any

import orjson

from agl_core.capture.context import current_attempt, current_variables, set_variables
from agl_core.capture.jsonable import jsonable
from agl_core.types import Json

_MAX_STATE = 16_384
"""Bytes of JSON."""
_MAX_HEADER = 6_144
"""Bytes of the packed header: proxies take headers of 8 KiB, and the others need room too."""
_MAX_UNPACKED = 1 << 20


def state(**values: Any) -> None:
    """Set the agent's semantic variables: the calls made from now on in this context carry them.

    They are kept as JSON with each call, as `Transition.state`, at most 16 KiB of it; what does not fit is replaced by
    a note that says so. A name that is set again has the new value, other names keep theirs. Outside any rollout it
    does nothing.

    >>> state(plan=["search", "answer"], budget=3)
    """
    if current_attempt() is not None:
        set_variables({name: jsonable(value, _MAX_STATE) for name, value in values.items()})


def packed_variables() -> str | None:
    """The variables of this context as a header's value, the longest cut first; None if there are none."""
    variables, limit = current_variables(), _MAX_STATE
    if not variables:
        return None
    while limit:
        text = orjson.dumps({name: jsonable(value, limit) for name, value in variables.items()})
        packed = _packed(text)
        if len(text) <= _MAX_STATE and len(packed) <= _MAX_HEADER:
            return packed
        limit //= 2
    return _packed(orjson.dumps({"…": f"{len(variables)} variables, too many to keep"}))


def _packed(text: bytes) -> str:
    return base64.urlsafe_b64encode(zlib.compress(text)).decode()


def unpack_variables(header: str | None) -> Mapping[str, Json] | None:
    """What `packed_variables` packed; None for anything else."""
    if header is None:
        return None
    try:
        unpacked = zlib.decompressobj().decompress(base64.urlsafe_b64decode(header), _MAX_UNPACKED)
        variables = orjson.loads(unpacked)
    except (binascii.Error, ValueError, zlib.error):
        return None
    return variables if isinstance(variables, dict) else None
