"""`--json`: what a reading command found, for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from agl_core.types.forms import to_json

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead, and nothing else to the output.")]


def print_json(value: Any) -> None:
    """Print a value made of JSON, records and paths; numbers that JSON lacks are the texts "nan", "inf" and "-inf"."""
    # Escaped: what an agent said is no command to the terminal here either.
    typer.echo(json.dumps(_plain(value), indent=2, ensure_ascii=True))


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        value = to_json(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value
