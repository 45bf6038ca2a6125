"""The Lightning Server, and runs from Python."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Run", "train", "train_async"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # Imported at its first use, since the help of `agl` needs none.
        return getattr(importlib.import_module("agl_server.runs"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
