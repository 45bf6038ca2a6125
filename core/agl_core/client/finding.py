"""Where a run's server is, and the key to it, for workers apart."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from agl_core.config.models import RunConfig
from agl_core.errors import ConfigError
from agl_core.wire import SERVER_FILE, WORKER_KEY, ServerFile


@dataclass(frozen=True, slots=True)
class Server:
    """What a worker has to know."""

    base_url: str
    key: str = field(repr=False)


def find_server(config: RunConfig, folder: Path | None, url: str | None) -> Server | None:
    """The server of a run: at `url`, else as the file in the run's `folder` says, or in the newest of its name.

    The key is that of AGL_WORKER_KEY, else that file's. None if there is no such file yet; ConfigError if only the key
    is missing.
    """
    file = _newest(config, folder)
    base_url = (url or (file and file.base_url) or "").rstrip("/")
    key = os.environ.get(WORKER_KEY, "").strip() or (file and file.worker_key)
    if base_url and not key:
        raise ConfigError(
            f"The key of the server at {base_url} is not known here: set {WORKER_KEY} to the value it has where "
            f"`agl train` runs (where it has none, it is the worker_key in the run's {SERVER_FILE})."
        )
    return Server(base_url, key) if base_url and key else None


def _newest(config: RunConfig, folder: Path | None) -> ServerFile | None:
    if folder is not None:
        files = [folder / SERVER_FILE]
    else:
        same_name = re.compile(rf"{re.escape(config.name)}(-\d+)?")
        files = [each for each in config.runs.glob(f"*/{SERVER_FILE}") if same_name.fullmatch(each.parent.name)]
    try:
        newest = max(files, key=lambda each: each.stat().st_mtime)
        return ServerFile.model_validate_json(newest.read_bytes())
    except (OSError, ValueError, ValidationError):  # There is none, or it is just being replaced.
        return None
