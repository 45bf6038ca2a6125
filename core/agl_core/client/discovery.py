"""Where a run's server is, and the key to it, for workers and other commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agl_core.config.models import RunConfig
from agl_core.errors import ConfigError
from agl_core.wire.keys import OPERATOR_KEY, SERVER_FILE, WORKER_KEY, ServerFile, problem_of_key

_URL = re.compile(r"https?://[^\s/]+")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens, and a key to it."""

    base_url: str
    key: str = field(repr=False)


def find_server(
    config: RunConfig | None, folder: Path | None, url: str | None, chosen: Mapping[str, str], name: str = WORKER_KEY
) -> ServerAddress | None:
    """The server of a run: at `url`, else as the file in the run's `folder` says, or in the newest run of its name.

    Without a configuration it is at `url`, with the key that the user chose.

    `name` is the variable of the key that is needed. The key is the `chosen` one of this name (`take_keys`), else the
    one in that file. None if there is no such file yet; ConfigError if only the key is missing, or if it is invalid.
    """
    base_url = (url or "").rstrip("/")
    file = _newest(config, folder, base_url)
    base_url = base_url or (file.base_url if file and not file.over else "")
    if base_url and not _URL.fullmatch(base_url):
        raise ConfigError(f"{base_url!r} is no address of a server. Give it as http://HOST:PORT.")
    kept = "operator_key" if name == OPERATOR_KEY else "worker_key"
    key = chosen.get(name) or (file and getattr(file, kept))
    if key and (problem := problem_of_key(name if name in chosen else SERVER_FILE, key)):
        raise ConfigError(f"{problem} Set it anew, to the value that it has where the server runs.")
    if base_url and not key:
        raise ConfigError(
            f"The key of the server at {base_url} is not known here: set {name} to the value it has where the server "
            f"runs (where it has none, it is the {kept} in the run's {SERVER_FILE})."
        )
    return ServerAddress(base_url, key) if base_url and key else None


def is_over(config: RunConfig | None, folder: Path | None, server: ServerAddress) -> bool:
    """Whether the file of this server says that its run is over; False on a machine that does not have the file."""
    file = _newest(config, folder, server.base_url)
    return file is not None and file.base_url == server.base_url and file.over


def _newest(config: RunConfig | None, folder: Path | None, base_url: str) -> ServerFile | None:
    """The file of this server, if there is one, else the newest one."""
    if folder is not None:
        files = [folder / SERVER_FILE]
    elif config is None:
        files = []
    else:
        same_name = re.compile(rf"{re.escape(config.name)}(-\d+)?")
        files = [each for each in config.runs.glob(f"*/{SERVER_FILE}") if same_name.fullmatch(each.parent.name)]
    found = [(each.stat().st_mtime, read) for each in files if (read := ServerFile.read(each)) is not None]
    found.sort(key=lambda each: (each[1].base_url == base_url, each[0]))
    return found[-1][1] if found else None
