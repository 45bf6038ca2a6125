"""agl's chat layer, and its command."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Engines import this package too.
    import typer


def add_commands(cli: typer.Typer) -> None:
    """Add `agl chat`, which is imported when it is called."""
    from agl_core.cli import COMMANDS, START, Command

    COMMANDS["chat"] = Command("agl_chat.front", "chat", START, "Keep token ids exact before a vLLM or SGLang server.")
