"""What analysis found, as JSON: for `--json`, and for anything else that shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

from agl_core.store.interface import Record
from agl_core.types import Episode
from agl_core.types.forms import to_json

_RECORDS = (*get_args(Record), Episode)


def plain(value: Any) -> Any:
    """A value made of JSON, dataclasses, records and paths, as JSON alone.

    Numbers that JSON lacks become the texts "nan", "inf" and "-inf".

    >>> plain({"path": Path("runs/calc"), "values": (1.0, math.inf)})
    {'path': 'runs/calc', 'values': [1.0, 'inf']}
    """
    if isinstance(value, _RECORDS):
        return plain(to_json(value))
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value
