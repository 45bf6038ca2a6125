"""The experience buffer "fifo": each complete group once, in the order of completion."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from agl_core.protocols import DrawContext, DrawnGroup
from agl_core.types import Episode


class Fifo:
    """Groups in the order in which they were completed, each for one update.

    It is as on-policy as the run allows: with `async.max_staleness = 0` an update gets what the weights that it
    changes have sampled.
    """

    def __init__(self) -> None:
        self._groups: deque[Sequence[Episode]] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def pending(self) -> list[str]:
        return [group[0].group for group in self._groups]

    def add(self, group: Sequence[Episode]) -> None:
        self._groups.append(group)

    def draw(self, count: int, context: DrawContext) -> list[DrawnGroup] | None:
        """The first `count` groups, or None if there are fewer."""
        if len(self._groups) < count:
            return None
        return [DrawnGroup(self._groups.popleft()) for _ in range(count)]
