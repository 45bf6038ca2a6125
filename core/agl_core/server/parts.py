"""Records that are to be written together and come in parts, since one request cannot carry them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from agl_core.server.faults import ApiError
from agl_core.store.interface import Record

_AT_ONCE = 4


class Parts:
    """Keeps the parts of what comes now; of more than a few at once, those that were heard of last."""

    def __init__(self) -> None:
        self._puts: OrderedDict[str, dict[int, Sequence[Record]]] = OrderedDict()

    def keep(self, put: str, number: int, records: Sequence[Record]) -> None:
        """One part has come; the same number again replaces it."""
        self._puts.setdefault(put, {})[number] = records
        self._puts.move_to_end(put)
        if len(self._puts) > _AT_ONCE:
            self._puts.popitem(last=False)

    def all_of(self, put: str, count: int) -> list[Record]:
        """The records of so many parts. ApiError 409 if one is missing: all of them are to be sent again."""
        parts = self._puts.get(put, {})
        missing = [number for number in range(count) if number not in parts]
        if missing:
            raise ApiError(
                409,
                f"Part {missing[0]} of {count} of these records is not here: the server was restarted, or has written "
                f"them. Send all parts again.",
                code="parts_missing",
            )
        return [record for number in range(count) for record in parts[number]]

    def drop(self, put: str) -> None:
        """They were written."""
        self._puts.pop(put, None)

    def clear(self) -> None:
        """Whoever sent them is gone."""
        self._puts.clear()
