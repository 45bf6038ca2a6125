"""`agl runs`: what runs there are, how to make them smaller, and how to remove them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from agl_core.analysis.text.words import score, size
from agl_core.cli.shared.options import AsJson
from agl_core.cli.shared.text import print_json

Folder = Annotated[Path, typer.Argument(help="Where the runs are.")]
Runs = Annotated[list[Path], typer.Argument(help="Runs: folders, or names below ./runs.")]
KeepSteps = Annotated[int, typer.Option(min=0, help="The number of last steps whose calls are kept complete.")]
KeepCheckpoints = Annotated[
    int | None,
    typer.Option(min=1, help="The number of last checkpoints to keep; by default the run's train.keep_checkpoints."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

runs = typer.Typer(help="List runs, make them smaller, and remove them.", no_args_is_help=True)


@runs.command("list")
def list_(folder: Folder = Path("runs"), as_json: AsJson = False) -> None:
    """List the runs: their state, what they came to, steps, size, and evaluation before and after training."""
    from rich.table import Table

    from agl_core.analysis.runs import list_runs
    from agl_core.cli.shared.screen import Screen

    entries = list_runs(folder)
    if as_json:
        print_json(entries)
        return
    table = Table("run", "state", "verdict")
    for column in ("steps", "size", "before", "after"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in entries:
        steps = f"{each.steps}" if each.of_steps is None else f"{each.steps}/{each.of_steps}"
        rewards = score(each.reward_before), score(each.reward_after)
        table.add_row(
            str(each.folder), each.state, each.verdict.word if each.verdict else "–", steps, size(each.size), *rewards
        )
    Screen().print(table)


@runs.command()
def prune(run: Runs, steps: KeepSteps = 10, checkpoints: KeepCheckpoints = None, as_json: AsJson = False) -> None:
    """Remove old checkpoints, and the texts and tokens of the calls of old steps.

    The last checkpoints are kept, and the best one. Metrics, rewards, tool results and what training made of each call
    stay, and the run can be read and resumed as before. A run that is being trained or served is refused. To make
    the store's file smaller, run agl runs vacuum afterwards.
    """
    from agl_core.analysis import runs
    from agl_core.cli.shared.screen import Screen

    done = [asyncio.run(runs.prune(folder, steps, checkpoints)) for folder in map(runs.find_run, run)]
    if as_json:
        print_json(done)
        return
    for each in done:
        Screen().print(
            f"{each.folder}: {each.calls} calls of the steps up to {each.up_to_step} pruned, "
            f"{len(each.checkpoints)} checkpoints removed"
        )
    Screen().print(f"next: agl runs vacuum {' '.join(str(each.folder) for each in done)}")


@runs.command()
def vacuum(run: Runs, as_json: AsJson = False) -> None:
    """Rewrite a run's store without its unused space. Meanwhile this needs as much free disk space again.

    A run that is being trained or served is refused.
    """
    from agl_core.analysis import runs
    from agl_core.cli.shared.screen import Screen

    done = [asyncio.run(runs.vacuum(folder)) for folder in map(runs.find_run, run)]
    if as_json:
        print_json(done)
        return
    for each in done:
        Screen().print(f"{each.folder}: {size(each.before)} → {size(each.after)}")


@runs.command()
def rm(run: Runs, yes: Yes = False) -> None:
    """Remove runs with all that they have: recorded rollouts, metrics and checkpoints.

    Asks first. A run that is being trained, served or evaluated is refused.
    """
    from agl_core.analysis import runs

    folders = list(dict.fromkeys(map(runs.find_run, run)))
    for folder in folders:
        entry = runs.read_entry(folder)
        if not yes:
            typer.confirm(f"Remove {folder} ({entry.state}, {entry.steps} steps, {size(entry.size)})?", abort=True)
        runs.remove(folder)
        typer.echo(f"removed {folder}")
