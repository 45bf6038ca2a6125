"""The commands of real use, by their names; they are imported when one of them is called."""

from __future__ import annotations

import typer

from agl_core.cli import COMMANDS, Command

HELP = {
    "serve": "Stand between deployed applications and their model.",
    "learn": "Serve a run's versions to applications, and learn from their sessions.",
    "sessions": "List and delete sessions of real use, and make keys for them.",
    "versions": "List, promote and roll back the versions that answer real use.",
    "policy": "Export and serve what runs have trained.",
}


def add_commands(cli: typer.Typer) -> None:
    """Add `agl serve`, `learn`, `sessions`, `versions` and `policy`."""
    COMMANDS.update({name: Command("agl_online.cli", name, "Real use", text) for name, text in HELP.items()})
