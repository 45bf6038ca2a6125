"""`agl learn`: serve a run's versions to real use, and learn from it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from agl_core.cli.options import Set

Target = Annotated[Path, typer.Argument(help="The run's configuration (TOML), or its folder.")]


def learn(
    target: Target,
    set_: Set = [],  # noqa: B006
) -> None:
    """Serve a run's versions to applications, learn from their sessions, and test each new version before it serves.

    The configuration has [online] with the applications, and [learn]. Everything runs on this machine: the engine that
    trains, the one that answers, server and workers. The address for applications is printed at the start; `agl
    sessions key` makes their keys.

    Each step takes sessions that ended and have a reward. Every learn.propose_every steps the weights go to the gate,
    and then to a share of the sessions, before they answer all of them (docs/deploy-and-learn.md). `agl versions` shows
    what became of each version.

    Ctrl-C stops the run and saves a checkpoint (exit status 130; 143 after SIGTERM). The same command goes on with it.
    """
    from agl_core.cli.screen import Screen
    from agl_core.cli.train import trained
    from agl_core.config import CONFIG_FILE, check, load
    from agl_core.wire.keys import OPERATOR_KEY
    from agl_online.learner import learn as run_learning

    loaded = load(target / CONFIG_FILE if target.is_dir() else target, set_)
    check(loaded)
    run_dir = target if target.is_dir() else loaded.config.runs / loaded.config.name
    console = Screen()
    console.print(f"run folder: {run_dir}")
    learning = partial(run_learning, loaded, run_dir)
    trained(loaded, run_dir, learning, os.environ.get(OPERATOR_KEY), console, f"agl learn {run_dir}")
