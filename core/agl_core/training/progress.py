"""What the training loop tells whoever watches it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Phase(Protocol):
    """One phase under way: rollouts, update or evaluation."""

    def advance(self, share: float, note: str = "") -> None:
        """`share` of it (0 … 1) is done; `note` is what is known so far, the reward for instance."""


class Observer(Protocol):
    """Shows progress; the loop works the same without one."""

    def phase(self, name: str, step: int) -> AbstractContextManager[Phase]:
        """A context in which a phase runs."""

    def say(self, text: str) -> None:
        """One line that should stay on the screen."""


class _SilentPhase:
    def advance(self, share: float, note: str = "") -> None:
        """Nobody watches."""


class Silent:
    """An observer that shows nothing."""

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[Phase]:
        yield _SilentPhase()

    def say(self, text: str) -> None:
        """Nobody listens."""
