"""What crosses between a run and its veRL driver, as bytes. Imports neither veRL nor torch.

The run writes commands to the driver's standard input, each one line of JSON and `size` bytes of body; the driver
answers each with one line of JSON, which is a result or an error. A driver that loses a part of the engine says so in
such a line, whether it was asked or not, and ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from agl_core.protocols import PolicySpec
from agl_verl.options import VerlOptions

SECONDS_TO_NOTICE = 90.0
"""How long the driver may take to notice a loss: Ray missed a killed node in 15; a silent one takes it longer."""


class Settings(BaseModel):
    """The first line on the driver's standard input."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    options: VerlOptions
    policy: str
    """Its name, which is the served model's too."""
    spec: PolicySpec
    seed: int
    deterministic: bool
    updates: int
    run_dir: Path
    plugin_files: tuple[Path, ...]
    api_key: str


class Ready(BaseModel):
    """The driver's first line: where it serves, or why it does not."""

    urls: tuple[str, ...] = ()
    context_length: int = 0
    error: str | None = None


class Command(BaseModel):
    """What the driver is to do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    do: Literal["update", "save", "load"]
    folder: Path | None = None
    """Of save and load."""
    size: int = 0
    """Bytes that follow: of an update its `UpdateRequest` (`agl_core.wire.updates`)."""

    def encode(self, body: bytes = b"") -> bytes:
        """The command's line and its body."""
        return self.model_copy(update={"size": len(body)}).model_dump_json().encode() + b"\n" + body


class Answer(BaseModel):
    """What became of a command."""

    value: dict[str, Any] = {}
    error: str | None = None
    kind: str = ""
    """The error's class."""
