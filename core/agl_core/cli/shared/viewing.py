"""The pages of a run in the browser, while a command works on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agl_core.cli.shared.screen import Screen
from agl_core.config.models import ServerSection
from agl_core.server.keys import is_loopback
from agl_core.view.serving import Shown, shown_beside


@asynccontextmanager
async def shown(
    run_dir: Path, server: ServerSection, operator_key: str | None, console: Screen
) -> AsyncIterator[Shown]:
    """Show the run, and print where: on this machine alone, unless others reach the server, and there is a key."""
    if is_loopback(server.host) or operator_key is None:
        host, key = "127.0.0.1", None
    else:
        host, key = server.host, operator_key
    async with shown_beside(run_dir, host, server.view_port, key) as pages:
        console.print(f"view:   {pages.address}")
        yield pages
