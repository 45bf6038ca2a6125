"""DSPy's cache of replies: in a rollout it must not answer, for each rollout samples its own replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dspy.clients.cache import Cache

from agl_core.capture import current_attempt
from agl_core.capture.attach.methods import wrap_once


def watch_cache() -> None:
    """Wrap what looks replies up and keeps them; calling it again changes nothing."""
    for name in ("get", "put"):
        wrap_once(Cache, name, _off_in_rollouts)


def _off_in_rollouts(method: Callable[..., Any]) -> Callable[..., Any]:
    def unless_in_rollout(cache: Cache, *args: Any, **kwargs: Any) -> Any:
        return method(cache, *args, **kwargs) if current_attempt() is None else None

    return unless_in_rollout
