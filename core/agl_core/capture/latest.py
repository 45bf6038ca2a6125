"""A dictionary that forgets its oldest entries."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Latest(dict[K, V]):
    """The latest `most` entries: one more drops the oldest.

    It holds what is open: frameworks do not report the end of every run, and those would pile up.

    >>> latest = Latest(2)
    >>> for number in range(3):
    ...     latest[number] = "open"
    >>> list(latest)
    [1, 2]
    """

    def __init__(self, most: int = 20_000) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self._most:
            del self[next(iter(self))]
