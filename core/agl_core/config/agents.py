"""Agents by name or pattern: which of them are trained, and which policy answers them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def is_among(agent: str | None, patterns: Sequence[str]) -> bool:
    """Whether an agent has one of these names; `*`, `?` and `[…]` in them are wildcards, upper case counts.

    A call whose agent is unknown has the empty name, so that `*` is everybody.

    >>> is_among("editor-2", ["writer", "editor*"]), is_among("critic", ["writer"]), is_among(None, ["*"])
    (True, False, True)
    """
    return any(fnmatchcase(agent or "", pattern) for pattern in patterns)
