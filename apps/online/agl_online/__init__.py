"""Real use of what agl trains: sessions, feedback, versions behind a gate and a canary, and serving a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_online.redaction import Redactor, redactor

__all__ = ["Redactor", "redactor"]


def __getattr__(name: str) -> Any:
    """The names above, imported when they are first used: the help of `agl` imports this package for its commands."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agl_online import redaction

    return getattr(redaction, name)
