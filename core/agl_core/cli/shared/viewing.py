"""The pages of a run in the browser, while a command works on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from agl_core.cli.shared.screen import Screen
from agl_core.config.models import ServerSection
from agl_core.plugins import Plugins
from agl_core.protocols import Upstream
from agl_core.server.keys import is_loopback


@asynccontextmanager
async def shown(
    run_dir: Path, server: ServerSection, operator_key: str | None, console: Screen
) -> AsyncIterator[Callable[[Upstream], None]]:
    """Show the run, if a plugin can, and print where; yields what tells the pages where its policies are served.

    They are shown on this machine alone, unless others reach the server, and there is a key.
    """
    if is_loopback(server.host) or operator_key is None:
        host, key = "127.0.0.1", None
    else:
        host, key = server.host, operator_key
    beside = Plugins.load().show_run(run_dir, host, server.view_port, key)
    if beside is None:
        yield lambda upstream: None
        return
    async with beside as pages:
        console.print(f"view:   {pages.address}")
        yield pages.serves
