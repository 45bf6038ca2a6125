"""The SDK sends its traces to its vendor, whatever endpoint the agent uses; rollouts are kept from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agents.tracing.processors import default_processor

from agl_core.capture import current_attempt
from agl_core.capture.attach.methods import wrap_once


def keep_rollouts_private() -> None:
    """Make the SDK's default processor pass over what happens in rollouts.

    There the endpoint and its key are agl's, and the data are the user's. Outside any rollout it goes on as it was;
    a processor of the user's own is left alone.
    """
    processor: Any = default_processor()
    wrap_once(processor, "on_trace_start", _outside_rollouts)
    wrap_once(processor, "on_span_end", _outside_rollouts)


def _outside_rollouts(event: Callable[[Any], None]) -> Callable[[Any], None]:
    def handle(ended: Any) -> None:
        if current_attempt() is None:
            event(ended)

    return handle
