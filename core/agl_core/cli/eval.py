"""`agl eval`: evaluate a run's checkpoint, or the initial weights of a configuration."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from agl_core.cli.as_json import AsJson, print_json
from agl_core.cli.train import Seed, ServerUrl, Set, find_run, reached

Target = Annotated[Path, typer.Argument(help="A run's folder, or a configuration file (its initial weights).")]
Step = Annotated[int | None, typer.Option(help="The checkpoint's step; the last by default.", show_default=False)]


def evaluate(
    target: Target,
    step: Step = None,
    seed: Seed = None,
    set_: Set = [],  # noqa: B006
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate on every held-out set, greedy and sampled, and print the rewards.

    They are also a line of the run's metrics.jsonl. With --server, a server elsewhere and its workers run the
    rollouts, as with `agl train --server`.
    """
    from agl_core.cli.observer import ConsoleObserver
    from agl_core.cli.screen import Screen
    from agl_core.cli.tables import print_evaluation
    from agl_core.config.check import check
    from agl_core.config.load import CONFIG_FILE, load
    from agl_core.server.http.event_loop import run
    from agl_core.training.checkpoints import CHECKPOINTS, Checkpoints
    from agl_core.training.run import METRICS_FILE, folder_of_served, new_run_dir
    from agl_core.training.run import evaluate as run_evaluation

    of_run = not target.is_file()
    file = find_run(target) / CONFIG_FILE if of_run else target
    loaded = load(file, set_, seed)
    check(loaded)
    checkpoint = None
    if of_run:
        checkpoints = Checkpoints(file.parent / CHECKPOINTS, loaded.config.train.keep_checkpoints)
        checkpoint = checkpoints.latest() if step is None else checkpoints.named(checkpoints.path(step).name)
    remote = None if server is None else reached(loaded, file.parent if of_run else None, server)
    fresh = new_run_dir if remote is None else functools.partial(folder_of_served, remote=remote)
    run_dir = file.parent if of_run else fresh(loaded)
    console = Screen(stderr=as_json)
    observer = ConsoleObserver(console, loaded.config.train.steps)
    entries = run(run_evaluation(loaded, run_dir, checkpoint, observer, remote=remote))
    if as_json:
        print_json({"run": run_dir, "checkpoint": checkpoint, "evaluations": entries})
        return
    print_evaluation(console, entries)
    console.print(f"written to {run_dir / METRICS_FILE}")
