"""`agl train`: train the agent that a configuration names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from agl_core.errors import ConfigError

Config = Annotated[Path | None, typer.Argument(help="The run's configuration (TOML).", show_default=False)]
Seed = Annotated[int | None, typer.Option(help="Overrides the file's seed.", show_default=False)]
Set = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Overrides one key, e.g. train.steps=20. Repeatable.")
]
Resume = Annotated[
    Path | None,
    typer.Option(help="A run's folder: go on from its last checkpoint, as its next incarnation.", show_default=False),
]


def train(config: Config = None, seed: Seed = None, set_: Set = [], resume: Resume = None) -> None:  # noqa: B006
    """Train the agent that CONFIG names, and print the reward before and after.

    Everything runs on this machine: the engine in a process of its own, server and workers in this one. Ctrl-C stops
    cleanly; --resume goes on. The run's folder holds the store, metrics.jsonl, checkpoints and summary.json.
    """
    from rich.console import Console

    from agl_core.cli.observer import ConsoleObserver
    from agl_core.cli.tables import print_summary
    from agl_core.config.check import check
    from agl_core.config.load import load
    from agl_core.training.run import CONFIG_FILE, new_run_dir
    from agl_core.training.run import train as run_training

    if config is not None and resume is None:
        file = config
    elif resume is not None and config is None:
        file = find_run(resume) / CONFIG_FILE
    else:
        raise ConfigError("Name either a configuration file or, with --resume, a run's folder. See agl train --help.")
    loaded = load(file, set_, seed)
    check(loaded)
    run_dir = new_run_dir(loaded) if resume is None else file.parent
    console = Console()
    console.print(f"run folder: {run_dir}", highlight=False)
    observer = ConsoleObserver(console, loaded.config.train.steps)
    summary = asyncio.run(run_training(loaded, run_dir, observer, resume=resume is not None))
    summary.write()
    print_summary(console, summary)


def find_run(folder: Path) -> Path:
    """A run's folder, given as such or by its name below `runs`."""
    from agl_core.training.run import CONFIG_FILE

    for candidate in (folder, Path("runs") / folder):
        if (candidate / CONFIG_FILE).is_file():
            return candidate
    runs = sorted(p.parent.name for p in Path("runs").glob(f"*/{CONFIG_FILE}"))
    known = f"Runs here: {', '.join(runs)}." if runs else "There are no runs below ./runs."
    raise ConfigError(f"{folder} is no run's folder (it has no {CONFIG_FILE}). {known}")
