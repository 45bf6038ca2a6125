"""Reading a run's store from the command line, also while the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from agl_core.cli.train import find_run
from agl_core.errors import ConfigError
from agl_core.types import Rollout, Run

if TYPE_CHECKING:
    from agl_core.store.interface import Store

Found = TypeVar("Found")


def read_run(run: Path | None, read: Callable[[Store], Awaitable[Found]]) -> tuple[Found, list[Run]]:
    """Call `read` with the run's store, opened for reading only; and the run's records. The newest run by default."""
    folder = newest_run() if run is None else find_run(run)
    build = store_of(folder)

    async def reading() -> tuple[Found, list[Run]]:
        store: Store = build(folder, True)
        async with store:
            return await read(store), await store.runs()

    return asyncio.run(reading())


def store_of(folder: Path) -> Callable[[Path, bool], Store]:
    """What opens the store of a run: called with its folder, and whether to read only."""
    from agl_core.cli.captures import is_capture, open_capture
    from agl_core.config.load import CONFIG_FILE, load_store

    return open_capture if is_capture(folder) else load_store(folder / CONFIG_FILE).build


def newest_run() -> Path:
    """The newest run's folder below ./runs."""
    from agl_core.config.load import CONFIG_FILE

    found = sorted(Path("runs").glob(f"*/{CONFIG_FILE}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError("There are no runs below ./runs. Name a run's folder, or train first: agl train CONFIG.")
    return found[-1].parent


def superseded(rollout: Rollout, runs: Sequence[Run]) -> bool:
    """Whether a later restart resumed from before this rollout's step."""
    return any(
        r.id == rollout.run
        and r.restart > rollout.restart
        and r.resumed_step is not None
        and rollout.mode.trains
        and rollout.step > r.resumed_step
        for r in runs
    )
