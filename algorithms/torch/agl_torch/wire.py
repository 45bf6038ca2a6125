"""How a run and its engine process greet each other. Imports no torch: the run's side uses it too."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from agl_core.protocols import PolicySpec
from agl_torch.options import TorchOptions


class Settings(BaseModel):
    """The first line on the engine process's standard input."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    options: TorchOptions
    policies: dict[str, PolicySpec]
    seed: int
    deterministic: bool
    updates: int = 0
    plugin_files: tuple[Path, ...]
    api_key: str
    """For the OpenAI-compatible routes."""
    control_key: str
    """For the routes below /engine."""


class Ready(BaseModel):
    """The one line on its standard output: where it listens, or why it does not."""

    port: int = 0
    context_length: int = 0
    error: str | None = None
