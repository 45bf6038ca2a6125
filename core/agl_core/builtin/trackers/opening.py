"""What trackers of other makers have in common: the run of theirs that a run goes on with, and opening it late."""

from __future__ import annotations

import importlib.util
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from agl_core import private
from agl_core.config import CONFIG_FILE
from agl_core.errors import PluginError

Opened = TypeVar("Opened")


def check_installed(module: str, extra: str) -> None:
    """PluginError with the remedy if a tracker's package is missing."""
    if importlib.util.find_spec(module) is None:
        raise PluginError(
            f"The tracker '{extra}' needs the package {module}: pip install 'agl-core[{extra}]', or leave it out "
            f"(--set trackers.{extra}=false)."
        )


class OpenedLate(ABC, Generic[Opened]):
    """Opens the tracker's run when there is something to log, so that training begins without it.

    If that fails, the error is raised once, and whatever comes later is ignored: each further try could take long.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._opened: Opened | None = None
        self._failed = False

    @abstractmethod
    def open(self) -> Opened:
        """Begin the tracker's run, or go on with it."""

    @property
    def opened(self) -> Opened | None:
        """None: it could not be opened."""
        if self._opened is None and not self._failed:
            self._failed = True
            self._opened = self.open()
            self._failed = False
        return self._opened

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    @property
    def config(self) -> dict[str, Any]:
        return tomllib.loads((self.run_dir / CONFIG_FILE).read_text())


def remembered(file: Path) -> str | None:
    """The id of the tracker's run that an earlier start wrote down."""
    return file.read_text().strip() or None if file.exists() else None


def remember(file: Path, id: str) -> None:
    """Write down which run of the tracker's this is, so that a resumed run goes on with it."""
    private.write(file, id)


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """A configuration as texts by dotted key.

    >>> flat({"train": {"steps": 4}})
    {'train.steps': '4'}
    """
    found: dict[str, str] = {}
    for key, value in config.items():
        name = f"{above}.{key}" if above else key
        found |= flat(value, name) if isinstance(value, Mapping) else {name: str(value)}
    return found
