"""The keys of workers and operators: their checks, their removal from the environment, and the file that has them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from pydantic import Field, ValidationError

from agl_core import private
from agl_core.wire.workers import Body

WORKER_KEY = "AGL_WORKER_KEY"
"""The environment variable that holds the workers' key."""
OPERATOR_KEY = "AGL_OPERATOR_KEY"
"""The environment variable that holds the operator's key, which opens the view from other machines."""
SERVER_FILE = "server.json"
"""In the run's folder: a `ServerFile`, readable by its owner alone."""


class ServerFile(Body):
    """How workers and commands on the same machine find a run's server, and how its keys survive a restart."""

    base_url: str
    worker_key: str | None = Field(repr=False, description="None: it is in the environment, and is not written down.")
    operator_key: str | None = Field(None, repr=False, description="None: as for the workers' key.")
    agent_secret: str = Field(repr=False, description="What the keys of leases and agents are made of.")
    begun: bool = Field(False, description="A trainer has begun the run: the store beside this file has it.")
    over: bool = Field(False, description="The run has made its last step, and is no longer served there.")

    @classmethod
    def read(cls, path: Path) -> ServerFile | None:
        """The file of a server; None if there is none, or another version of agl wrote it."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None

    def write(self, path: Path) -> None:
        """Replace the file; only its owner can read it."""
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        private.write(new, self.model_dump_json())
        new.replace(path)


def take_keys() -> dict[str, str]:
    """The keys that the user chose, without space around them, by the names of their variables.

    Both variables are removed from the environment, because processes that this process starts may belong to an agent.
    They are also removed from what the system shows of this process (/proc/PID/environ on Linux), which has its initial
    environment.
    """
    keys = {name: take_key(name) for name in (WORKER_KEY, OPERATOR_KEY)}
    return {name: key for name, key in keys.items() if key}


def take_key(name: str) -> str | None:
    """The key in this variable, which is removed as `take_keys` does it; None if there is none."""
    key = os.environ.get(name, "").strip()
    _overwrite(name)
    os.environ.pop(name, None)
    return key or None


def problem_of_key(name: str, key: str) -> str | None:
    """The fault of a key, without showing it; None if it is valid. `name` is where it comes from.

    >>> problem_of_key("AGL_WORKER_KEY", "s3cret"), problem_of_key("AGL_WORKER_KEY", "a\\nb")
    (None, 'AGL_WORKER_KEY has a line break or another control character in it, which no HTTP header can carry.')
    """
    if not key.isascii():
        return f"{name} has characters that no HTTP header can carry: use ASCII only."
    if not key.isprintable():
        return f"{name} has a line break or another control character in it, which no HTTP header can carry."
    return None


def _overwrite(name: str) -> None:
    """Blank the variable's value in memory: removing it from `os.environ` leaves it there."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    if address := getenv(name.encode()):
        ctypes.memset(address, ord(" "), len(ctypes.string_at(address)))
