"""The folders of runs that were recorded without a configuration."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from agl_core.config.load import CONFIG_FILE
from agl_core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def new_capture(name: str, told: Mapping[str, Any]) -> Path:
    """`runs/NAME`, or `runs/NAME-2` and so on if it is taken; `told` says what was recorded there."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name '{name}' is no folder's name: use letters, digits, '.', '_' and '-'.")
    number = 1
    while True:
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        (folder / CONFIG_FILE).write_text(tomli_w.dumps({"config_version": 1, "capture": dict(told)}))
        return folder


def is_capture(folder: Path) -> bool:
    """Whether a run's folder was made by `new_capture`."""
    try:
        return "capture" in tomllib.loads((folder / CONFIG_FILE).read_text())
    except (OSError, tomllib.TOMLDecodeError):
        return False
