"""Episodes of an adapter that is used alone: with no gateway, what its framework reports is all there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agl_core.capture import CapturedRollout
from agl_core.learning.transitions import build_episode
from agl_core.types import Episode, Transition


class Kept(Protocol):
    """Where an adapter keeps rollouts, for instance `agl_core.capture.Capture`."""

    def finished(self) -> Sequence[CapturedRollout]: ...

    def clear(self) -> None:
        """Forget them."""


class Alone:
    """What an adapter that is used alone offers: the agent's runs as data."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    def episodes(self) -> list[Episode]:
        """The agent's runs that have ended, as text; with token ids where the framework keeps the endpoint's."""
        return [build_episode(*rollout.records()) for rollout in self._kept.finished()]

    def transitions(self) -> list[Transition]:
        return [transition for episode in self.episodes() for transition in episode.transitions]

    def clear(self) -> None:
        self._kept.clear()
