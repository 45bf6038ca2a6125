"""`agl train`: train the agent that a configuration names."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from agl_core.cli.screen import ConsoleObserver, Screen, Seed, Set, show_in_browser, table
from agl_core.config.check import check
from agl_core.config.load import CONFIG_FILE, LoadedConfig, load
from agl_core.errors import ConfigError
from agl_core.protocols import Engine
from agl_core.reading.metrics import RunVerdict, read_metrics, verdict_of
from agl_core.reading.runs import find_checkpoint
from agl_core.reading.words import plain, score
from agl_core.server.listening import run
from agl_core.training.checkpoints import CHECKPOINTS, Checkpoints
from agl_core.training.metrics import Summary, counts
from agl_core.training.run import train as run_training
from agl_core.training.server import new_run_dir
from agl_core.training.session import engine_context
from agl_core.wire import OPERATOR_KEY

Config = Annotated[Path | None, typer.Argument(help="The run's configuration (TOML).")]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN[@STEP]",
        help="A run: go on from its last checkpoint, or from that of a step, as its next restart.",
    ),
]
EngineName = Annotated[str | None, typer.Option("--engine", metavar="NAME", help="Overrides engine.name.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Start nothing; show what the engine would start, and the resources that it would take."
    ),
]


def train(
    config: Config = None,
    seed: Seed = None,
    set_: Set = [],  # noqa: B006
    resume: Resume = None,
    engine: EngineName = None,
    dry_run: DryRun = False,
) -> None:
    """Train the agent that CONFIG names, and print the reward before and after.

    A new run begins with one rollout of the agent, which is shown; if the agent fails, training does not begin. At the
    end it says what the run came to: learned, not yet, or cannot, and why. If no rollout finished, the exit
    status is 1.

    Everything runs on this machine: the engine in a process of its own, server and workers in this one. The address
    that is printed at the start shows the run in a browser. Ctrl-C stops the run and saves a checkpoint (exit status
    130; 143 after SIGTERM). The run's folder holds the store, metrics.jsonl, checkpoints and summary.json.

    --resume goes on with a run. From an earlier checkpoint (--resume calc@3, calc@best) it replaces what came
    later: later checkpoints and metrics are removed. What --set changes is listed, and holds from then on.

    Workers may run on other machines too (`agl worker CONFIG --server URL`): with --set workers.embedded=false there is
    none here. To be reached by them, give it an address of this machine (--set server.host=ADDRESS) and set
    AGL_WORKER_KEY here and there. What crosses the network is not encrypted.
    """
    checkpoint = None
    if config is not None and resume is None:
        file = config
    elif resume is not None and config is None:
        folder, step = find_checkpoint(str(resume))
        file = folder / CONFIG_FILE
        if step is not None and (checkpoint := Checkpoints(folder / CHECKPOINTS, keep=1).meant_by(step)) is None:
            raise ConfigError(f"{resume}: a run is resumed from a checkpoint. To begin at step 0, start a new run.")
    else:
        raise ConfigError("Name either a configuration file or, with --resume, a run's folder. See agl train --help.")
    loaded = load(file, [*set_, *([] if engine is None else [f"engine.name={engine}"])], seed)
    check(loaded)
    if dry_run:
        typer.echo(describe_engine(loaded), nl=False)
        return
    run_dir = new_run_dir(loaded) if resume is None else file.parent
    console = Screen()
    console.print(f"run folder: {run_dir}")
    is_new = resume is None
    training = partial(run_training, loaded, run_dir, resume=not is_new, checkpoint=checkpoint, look=is_new)
    train_and_report(loaded, run_dir, training, os.environ.get(OPERATOR_KEY), console)


def train_and_report(
    loaded: LoadedConfig,
    run_dir: Path,
    training: Callable[[ConsoleObserver], Awaitable[Summary]],
    operator_key: str | None,
    console: Screen,
    go_on: str | None = None,
) -> None:
    """Train while the browser can show the run, and print the result; for `go_on` see `print_summary`."""

    async def work() -> Summary:
        async with show_in_browser(run_dir, loaded.config.server, operator_key, console):
            return await training(ConsoleObserver(console, loaded.config.train.steps))

    summary = run(work())
    verdict = verdict_of(read_metrics(run_dir))
    summary.write(plain(verdict))
    print_summary(console, summary, go_on, verdict)
    if summary.stopped_by is not None:
        raise typer.Exit(128 + summary.stopped_by)
    if verdict is not None and verdict.failed:
        raise typer.Exit(1)


def describe_engine(loaded: LoadedConfig) -> str:
    """The processes and resources that the engine of this configuration would start and take."""
    engine: Engine = loaded.engine.build(engine_context(loaded, loaded.config.runs / loaded.config.name))
    if engine.supports("describe"):
        return engine.describe()
    return f"{loaded.engine.label} starts one process on this machine.\n"


def print_summary(
    console: Screen, summary: Summary, go_on: str | None = None, verdict: RunVerdict | None = None
) -> None:
    """Reward before and after, verdict, cost, where everything is, and what to do next.

    `go_on` is the command that goes on with a run that was stopped; None: that of `agl train`.
    """
    state = summary.state
    rewards = table("held-out set", "sampling", numbers=("before", "after"))
    for name in summary.sets:
        by_mode = summary.rewards(name)
        for mode in ("greedy", "sampled"):
            rewards.add_row(name, mode, score(by_mode["before"][mode]), score(by_mode["after"][mode]))
    if summary.sets:
        console.print(rewards)
    console.print(f"verdict: {verdict.text if verdict else 'none, for no step was made'}", style="bold")
    transitions = counts(summary.steps, "transitions/")
    idle = transitions["without_advantage"]
    idle_note = f" ({idle} of them with an advantage of 0)" if idle else ""

    share = summary.exact_share
    exact = "" if share is None else f"; proved to be what was sampled: {share:.2%}"

    def listed(prefix: str) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(counts(summary.steps, prefix).items())) or "none"

    facts = [
        ("steps", f"{state.step}, in {state.seconds:.0f} s{', stopped early' if summary.stopped_by else ''}"),
        ("memory", f"{state.peak_rss_bytes / 2**20:.0f} MiB at most"),
        ("rollouts", listed("ending/")),
        ("transitions", f"{transitions['kept']} trained on{idle_note}; dropped: {listed('dropped/')}"),
        ("tokens", f"{summary.proved.total()} trained on: {listed('proved/')}{exact}"),
        ("checkpoint", str(summary.checkpoint or "none")),
        ("model", ", ".join(map(str, summary.models)) or "none"),
        ("summary", str(summary.file)),
        *(("adapter", f"{problem} ({count} times)") for problem, count in summary.problems.items()),
    ]
    for name, fact in facts:
        console.print(f"{name:<12} {fact}")
    following = f"agl rollouts {summary.run_dir} --limit 5"
    if summary.stopped_by:
        following = go_on or f"agl train --resume {summary.run_dir}"
    console.print(f"next: {following}")
