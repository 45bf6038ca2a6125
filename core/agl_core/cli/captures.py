"""The folders of runs that were recorded without a configuration."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from agl_core import private
from agl_core.config.load import CONFIG_FILE
from agl_core.errors import ConfigError

if TYPE_CHECKING:
    from agl_core.store.interface import Store

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def new_capture(name: str, told: Mapping[str, Any]) -> Path:
    """`runs/NAME`, or `runs/NAME-2` and so on if it is taken; `told` says what was recorded there."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name '{name}' is no folder's name: use letters, digits, '.', '_' and '-'.")
    from agl_core.training.run import first_free

    configuration = tomli_w.dumps({"config_version": 1, "capture": dict(told)})
    return first_free(Path("runs") / name, lambda folder: private.write(folder / CONFIG_FILE, configuration))


def is_capture(folder: Path) -> bool:
    """Whether a run's folder was made by `new_capture`."""
    try:
        return "capture" in tomllib.loads((folder / CONFIG_FILE).read_text())
    except (OSError, tomllib.TOMLDecodeError):
        return False


def open_capture(folder: Path, read_only: bool) -> Store:
    """The store of a capture."""
    from agl_core.store.sqlite import SqliteStore

    return SqliteStore(folder / "store.sqlite", read_only=read_only)
