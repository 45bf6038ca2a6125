"""`agl runs`: what runs there are, and how to make them smaller."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from agl_core.cli.reading import store_of
from agl_core.cli.train import find_run
from agl_core.errors import StoreError

if TYPE_CHECKING:
    from agl_core.store.interface import Store

Found = TypeVar("Found")
Folder = Annotated[Path, typer.Argument(help="Where the runs are.")]
Runs = Annotated[list[Path], typer.Argument(help="Runs: folders, or names below ./runs.", show_default=False)]
KeepSteps = Annotated[int, typer.Option(min=0, help="Keep the calls of the last so many steps whole.")]
KeepCheckpoints = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Keep the last so many checkpoints, and the best one; by default the run's train.keep_checkpoints.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

runs = typer.Typer(help="List runs, and make them smaller.", no_args_is_help=True)


@runs.command("list")
def list_(folder: Folder = Path("runs"), as_json: AsJson = False) -> None:
    """List the runs: their state, steps, size, and evaluation before and after training."""
    from rich.table import Table

    from agl_core.cli.screen import Screen
    from agl_core.training.retention import list_runs

    entries = list_runs(folder)
    if as_json:
        typer.echo(json.dumps([{**asdict(entry), "folder": str(entry.folder)} for entry in entries], indent=2))
        return
    table = Table("run", "state")
    for column in ("steps", "size", "before", "after"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in entries:
        of_steps = "" if entry.of_steps is None else f"/{entry.of_steps}"
        rewards = (entry.reward_before, entry.reward_after)
        table.add_row(
            str(entry.folder),
            entry.state,
            f"{entry.steps}{of_steps}",
            _size(entry.size),
            *("–" if reward is None else f"{reward:.3f}" for reward in rewards),
        )
    Screen().print(table)


@runs.command()
def prune(run: Runs, steps: KeepSteps = 10, checkpoints: KeepCheckpoints = None, as_json: AsJson = False) -> None:
    """Remove old checkpoints, and the texts and tokens of the calls of old steps.

    The last checkpoints are kept, and the best one. Metrics, rewards, tool results and what training made of each call
    stay, and the run can be read and resumed as before. A run that is being trained or served is refused. The store's
    file gets smaller by agl runs vacuum.
    """
    from agl_core.cli.screen import Screen
    from agl_core.training.retention import has_store, prune_calls, prune_checkpoints

    done: list[dict[str, Any]] = []
    for folder in map(find_run, run):
        calls, up_to = 0, 0
        if has_store(folder):
            calls, up_to = _with_store(folder, functools.partial(prune_calls, folder=folder, keep_steps=steps))
        removed = [str(path) for path in prune_checkpoints(folder, checkpoints)]
        done.append({"folder": str(folder), "calls": calls, "up_to_step": up_to, "checkpoints": removed})
    if as_json:
        typer.echo(json.dumps(done, indent=2))
        return
    for each in done:
        Screen().print(
            f"{each['folder']}: {each['calls']} calls of the steps up to {each['up_to_step']} pruned, "
            f"{len(each['checkpoints'])} checkpoints removed",
            soft_wrap=True,
        )
    Screen().print(f"next: agl runs vacuum {' '.join(each['folder'] for each in done)}", soft_wrap=True)


@runs.command()
def vacuum(run: Runs, as_json: AsJson = False) -> None:
    """Write a run's store anew without unused space, which takes as much free space again for the time.

    A store of an older agl is brought up to date. A run that is being trained or served is refused.
    """
    from agl_core.cli.screen import Screen
    from agl_core.training.retention import has_store, size_of
    from agl_core.training.retention import vacuum as vacuum_store

    done: list[dict[str, Any]] = []
    for folder in map(find_run, run):
        if not has_store(folder):
            raise StoreError(f"The store of {folder} is with the server that recorded the run. Vacuum it there.")
        before = size_of(folder)
        _with_store(folder, functools.partial(vacuum_store, folder=folder))
        done.append({"folder": str(folder), "before": before, "after": size_of(folder)})
    if as_json:
        typer.echo(json.dumps(done, indent=2))
        return
    for each in done:
        Screen().print(f"{each['folder']}: {_size(each['before'])} → {_size(each['after'])}", soft_wrap=True)


def _with_store(folder: Path, work: Callable[[Store], Awaitable[Found]]) -> Found:
    """What `work` returns, called with the run's store, open for writing; StoreError if it is being written."""

    async def working() -> Found:
        async with store_of(folder)(folder, False) as store:
            return await work(store)

    return asyncio.run(working())


def _size(size: float) -> str:
    """
    >>> _size(999), _size(1536), _size(5 * 2**30)
    ('999 B', '1.5 KiB', '5.0 GiB')
    """
    units = ["TiB", "GiB", "MiB", "KiB", "B"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop()
    return f"{size:.0f} B" if units[-1] == "B" else f"{size:.1f} {units[-1]}"
