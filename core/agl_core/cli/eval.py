"""`agl eval`: evaluate a run's checkpoint, or the initial weights of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agl_core.analysis.words import score
from agl_core.cli.shared.options import AsJson, Seed, ServerUrl, Set
from agl_core.cli.shared.text import print_json
from agl_core.cli.train import reached

Target = Annotated[Path, typer.Argument(help="A run's folder, or a configuration file (its initial weights).")]
Step = Annotated[int | None, typer.Option(help="The checkpoint's step; by default the last.")]


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
    from rich.table import Table

    from agl_core.analysis.runs import find_run
    from agl_core.cli.shared.screen import ConsoleObserver, Screen
    from agl_core.config import CONFIG_FILE, check, load
    from agl_core.server.http.event_loop import run
    from agl_core.training.checkpoints import CHECKPOINTS, Checkpoints
    from agl_core.training.metrics import METRICS_FILE
    from agl_core.training.run import evaluate as run_evaluation
    from agl_core.training.run import run_dir_of

    of_run = not target.is_file()
    file = find_run(target) / CONFIG_FILE if of_run else target
    loaded = load(file, set_, seed)
    check(loaded)
    checkpoint = None
    if of_run:
        checkpoints = Checkpoints(file.parent / CHECKPOINTS, loaded.config.train.keep_checkpoints)
        checkpoint = checkpoints.latest() if step is None else checkpoints.named(checkpoints.path(step).name)
    remote = None if server is None else reached(loaded, file.parent if of_run else None, server)
    run_dir = file.parent if of_run else run_dir_of(loaded, remote)
    console = Screen(stderr=as_json)
    observer = ConsoleObserver(console, loaded.config.train.steps)
    entries = run(run_evaluation(loaded, run_dir, checkpoint, observer, remote=remote))
    if as_json:
        print_json({"run": run_dir, "checkpoint": checkpoint, "evaluations": entries})
        return
    table = Table("held-out set", "sampling", "reward", "rollouts", "seconds")
    for each in entries:
        table.add_row(each["set"], each["mode"], score(each["reward"]), str(each["rollouts"]), f"{each['seconds']:.1f}")
    console.print(table)
    console.print(f"written to {run_dir / METRICS_FILE}")
