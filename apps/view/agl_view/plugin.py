"""The pages of a run beside the command that works on it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from agl_core import hookimpl


@hookimpl
def show_run(run: Path, host: str, port: int, operator_key: str | None) -> AbstractAsyncContextManager[str]:
    """Show a run while a command works on it."""
    from agl_view.serving import shown_beside

    return shown_beside(run, host, port, operator_key)
