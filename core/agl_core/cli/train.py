"""`agl train`: train the agent that a configuration names."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agl_core.errors import ConfigError

if TYPE_CHECKING:
    from agl_core.client import ServerAddress
    from agl_core.config.load import LoadedConfig

Config = Annotated[Path | None, typer.Argument(help="The run's configuration (TOML).", show_default=False)]
Seed = Annotated[int | None, typer.Option(help="Overrides the file's seed.", show_default=False)]
Set = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Overrides one key, e.g. train.steps=20. Repeatable.")
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN[/checkpoints/STEP]",
        help="A run's folder: go on from its last checkpoint, or from the one named, as its next restart.",
        show_default=False,
    ),
]
ServerUrl = Annotated[
    str | None,
    typer.Option("--server", metavar="URL", help="Where `agl serve` listens, instead of here.", show_default=False),
]
EngineName = Annotated[
    str | None, typer.Option("--engine", metavar="NAME", help="Overrides engine.name.", show_default=False)
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Start nothing; show what the engine would start, and what that would take."),
]


def train(
    config: Config = None,
    seed: Seed = None,
    set_: Set = [],  # noqa: B006
    resume: Resume = None,
    server: ServerUrl = None,
    engine: EngineName = None,
    dry_run: DryRun = False,
) -> None:
    """Train the agent that CONFIG names, and print the reward before and after.

    Everything runs on this machine: the engine in a process of its own, server and workers in this one. Ctrl-C stops
    cleanly (exit status 130; 143 after SIGTERM); --resume goes on. The run's folder holds the store, metrics.jsonl,
    checkpoints and summary.json.

    A run that goes on from a checkpoint, say --resume RUN/checkpoints/step-000003, supersedes what came after it:
    later checkpoints and metrics are removed. What --set changes is listed, and holds from then on.

    With --server, the server and its store run elsewhere (`agl serve CONFIG`) and so do the workers (`agl worker
    CONFIG --server URL`); here are the engine, the checkpoints and the metrics. On another machine than the server's,
    set AGL_OPERATOR_KEY to the value it has there. While the server is away, training waits for it.
    """
    from agl_core.cli.observer import ConsoleObserver
    from agl_core.cli.screen import Screen
    from agl_core.cli.tables import print_summary
    from agl_core.config.check import check
    from agl_core.config.load import CONFIG_FILE, load
    from agl_core.server.http.event_loop import run
    from agl_core.training.run import folder_of_served, new_run_dir
    from agl_core.training.run import train as run_training

    checkpoint = None
    if config is not None and resume is None:
        file = config
    elif resume is not None and config is None:
        folder, checkpoint = find_checkpoint(resume)
        file = folder / CONFIG_FILE
    else:
        raise ConfigError("Name either a configuration file or, with --resume, a run's folder. See agl train --help.")
    chosen = [] if engine is None else [f"engine.name={engine}"]
    loaded = load(file, [*set_, *chosen], seed)
    check(loaded)
    if dry_run:
        print(described_engine(loaded), end="")
        return
    remote = None if server is None else reached(loaded, file.parent if resume else None, server)
    fresh = new_run_dir if remote is None else functools.partial(folder_of_served, remote=remote)
    run_dir = fresh(loaded) if resume is None else file.parent
    console = Screen()
    console.print(f"run folder: {run_dir}")
    observer = ConsoleObserver(console, loaded.config.train.steps)
    summary = run(
        run_training(loaded, run_dir, observer, resume=resume is not None, checkpoint=checkpoint, remote=remote)
    )
    summary.write()
    print_summary(console, summary)
    if summary.stopped_by is not None:
        raise typer.Exit(128 + summary.stopped_by)


def described_engine(loaded: LoadedConfig) -> str:
    """What the engine of this configuration would start."""
    from agl_core.protocols import DescribedEngine
    from agl_core.training.session import engine_context

    engine = loaded.engine.build(engine_context(loaded, loaded.config.runs / loaded.config.name))
    if isinstance(engine, DescribedEngine):
        return engine.describe()
    return f"{loaded.engine.label} starts one process on this machine.\n"


def reached(loaded: LoadedConfig, folder: Path | None, url: str) -> ServerAddress:
    """The server at this address, with the operator's key. ConfigError if it refuses the key that is found here."""
    from agl_core.client import BlockingClient, RefusedError, UnreachableError, find_server
    from agl_core.wire.keys import OPERATOR_KEY, SERVER_FILE, take_keys
    from agl_core.wire.trainers import RunsQuery

    chosen = take_keys()
    server = find_server(loaded.config, folder, url, chosen, OPERATOR_KEY)
    assert server is not None, "an address was given"
    try:
        with BlockingClient(server.base_url, server.key) as client:
            client.query(RunsQuery())
    except UnreachableError:  # It is waited for, once there is a run to wait with.
        return server
    except RefusedError as error:
        if error.status not in (401, 403):
            raise
        found = f"the value of {OPERATOR_KEY}" if chosen.get(OPERATOR_KEY) else f"in a {SERVER_FILE}"
        raise ConfigError(
            f"The server at {server.base_url} refuses the operator key that is found here ({found}): it is that of "
            f"another server. Set {OPERATOR_KEY} to the key of this one: its own {OPERATOR_KEY}, or where it has none, "
            f"the operator_key in the {SERVER_FILE} of the run that it serves."
        ) from error
    return server


def find_checkpoint(target: Path) -> tuple[Path, Path | None]:
    """A run's folder, and its checkpoint if `target` is one: RUN/checkpoints/STEP."""
    from agl_core.training.checkpoints import CHECKPOINTS, Checkpoints

    if target.parent.name != CHECKPOINTS:
        return find_run(target), None
    folder = find_run(target.parent.parent)
    return folder, Checkpoints(folder / CHECKPOINTS, keep=1).named(target.name)


def find_run(folder: Path) -> Path:
    """A run's folder, given as such or by its name below `runs`."""
    from agl_core.config.load import CONFIG_FILE

    for candidate in (folder, Path("runs") / folder):
        if (candidate / CONFIG_FILE).is_file():
            return candidate
    runs = sorted(p.parent.name for p in Path("runs").glob(f"*/{CONFIG_FILE}"))
    known = f"Runs here: {', '.join(runs)}." if runs else "There are no runs below ./runs."
    raise ConfigError(f"{folder} is no run's folder (it has no {CONFIG_FILE}). {known}")
