"""Whether a store and its disk have room for more sessions."""

from __future__ import annotations

import asyncio
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_GIB = 1 << 30


@dataclass(slots=True)
class Room:
    """What sessions may fill; the limits are in GiB."""

    folder: Path
    """Of the store."""
    largest: float | None
    """The size of the store from which on there is no room; None for any size."""
    least: float
    """The free space of the disk below which there is none."""
    _was_there: bool = True

    async def is_there(self) -> bool:
        """Whether there is room now; a change for the worse is logged."""
        there = await asyncio.to_thread(self._look)
        if self._was_there and not there:
            logger.warning("There is no room for more sessions in %s: they are answered, not recorded.", self.folder)
        self._was_there = there
        return there

    def _look(self) -> bool:
        size = sum(each.stat().st_size for each in self.folder.glob("store.sqlite*"))
        if self.largest is not None and size >= self.largest * _GIB:
            return False
        return shutil.disk_usage(self.folder).free >= self.least * _GIB
