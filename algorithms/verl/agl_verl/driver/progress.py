"""How far an update is, by what its stages took the last time."""

from __future__ import annotations

from collections.abc import Mapping

FIRST: Mapping[str, float] = {"old_log_prob": 1.0, "update_actor": 3.0, "update_weights": 1.0}
"""veRL's names of the longest stages, and what they are thought to take before one was measured."""
MOST = 0.99
"""Of an update that has not ended."""


class UpdateProgress:
    """Shares of updates that are alike.

    >>> progress = UpdateProgress()
    >>> progress.share({"old_log_prob": 7.0})
    0.2
    >>> progress.ended({"old_log_prob": 2.0, "ref": 2.0, "update_actor": 4.0})
    >>> progress.share({"old_log_prob": 3.0, "ref": 3.0})
    0.5
    """

    def __init__(self) -> None:
        self._usual = FIRST

    def share(self, done: Mapping[str, float]) -> float:
        """Of an update whose finished stages are `done`."""
        whole = sum(self._usual.values())
        return min(MOST, sum(self._usual.get(name, 0.0) for name in done) / whole) if whole else 0.0

    def ended(self, seconds: Mapping[str, float]) -> None:
        """Remember what the stages of an update took."""
        self._usual = dict(seconds)
