"""The command of this package, by its name; it is imported when it is called."""

from __future__ import annotations

import typer

from agl_core.cli import COMMANDS, START, Command

HELP = "Improve the prompts of the agent that a configuration names."


def add_commands(cli: typer.Typer) -> None:
    """Add `agl optimize`."""
    COMMANDS["optimize"] = Command("agl_prompts.cli", "optimize", START, HELP)
