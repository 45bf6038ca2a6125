"""`agl runs`: the runs there are, making them smaller, and removing them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from agl_core.cli.options import AsJson, Runs
from agl_core.cli.screen import Screen, print_json, table
from agl_core.reading import runs as reading
from agl_core.reading.words import score, size

Folder = Annotated[Path, typer.Argument(help="The folder with the runs.")]
KeepSteps = Annotated[int, typer.Option(min=0, help="The number of last steps whose calls are kept complete.")]
KeepCheckpoints = Annotated[
    int | None,
    typer.Option(min=1, help="The number of last checkpoints to keep; by default the run's train.keep_checkpoints."),
]

runs = typer.Typer(help="List runs, make them smaller, and remove them.", no_args_is_help=True)


@runs.command("list")
def list_(folder: Folder = reading.RUNS, as_json: AsJson = False) -> None:
    """List the runs: their state, their verdict, steps, size, and evaluation before and after training."""
    entries = reading.list_runs(folder)
    if as_json:
        print_json(entries)
        return
    listed = table("run", "state", "verdict", numbers=("steps", "size", "before", "after"))
    for run in entries:
        steps = f"{run.steps}" if run.of_steps is None else f"{run.steps}/{run.of_steps}"
        rewards = score(run.reward_before), score(run.reward_after)
        verdict = run.verdict.word if run.verdict else "–"
        listed.add_row(str(run.folder), run.state, verdict, steps, size(run.size), *rewards)
    Screen().print(listed)


@runs.command()
def prune(run: Runs, steps: KeepSteps = 10, checkpoints: KeepCheckpoints = None, as_json: AsJson = False) -> None:
    """Remove old checkpoints, and the texts and tokens of the calls of old steps.

    The last checkpoints are kept, and the best one. Metrics, rewards, tool results and what training made of each call
    stay, and the run can be read and resumed as before. Meanwhile the store needs as much free disk space again. A run
    that is being trained or served is refused.
    """
    pruned = [asyncio.run(reading.prune(folder, steps, checkpoints)) for folder in map(reading.find_run, run)]
    if as_json:
        print_json(pruned)
        return
    for done in pruned:
        Screen().print(
            f"{done.folder}: {done.calls} calls of the steps up to {done.up_to_step} pruned, "
            f"{len(done.checkpoints)} checkpoints removed, {size(done.before)} → {size(done.after)}"
        )


@runs.command()
def rm(run: Runs, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> None:
    """Remove runs with all their files: recorded rollouts, metrics and checkpoints.

    Asks first. A run that is being trained, served or evaluated is refused.
    """
    for folder in dict.fromkeys(map(reading.find_run, run)):
        entry = reading.read_entry(folder)
        if not yes:
            typer.confirm(f"Remove {folder} ({entry.state}, {entry.steps} steps, {size(entry.size)})?", abort=True)
        reading.remove(folder)
        typer.echo(f"removed {folder}")
