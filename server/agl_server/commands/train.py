"""`agl train` and `agl eval`: train the agent that a configuration names; evaluate a run, or compare two of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from agl_core.cli.screen import AsJson, Screen, Set, print_json, table
from agl_core.cli.words import score
from agl_core.config.load import CONFIG_FILE, LoadedConfig, load
from agl_core.errors import ConfigError
from agl_core.protocols import Engine
from agl_core.types import Mode
from agl_core.wire import OPERATOR_KEY
from agl_server.commands.screen import ConsoleObserver, HarnessName, Seed, show_in_browser
from agl_server.health.verdict import METRICS_FILE, counts
from agl_server.http.listening import run
from agl_server.reading.files import is_recording
from agl_server.reading.runs import find_run
from agl_server.training.checkpoints import CHECKPOINTS, Checkpoints
from agl_server.training.evaluation import Comparison, Estimate, TaskScore, compare, passes
from agl_server.training.metrics import Prices, Summary, scores_of
from agl_server.training.run import evaluate as run_evaluation
from agl_server.training.run import new_run_dir
from agl_server.training.run import train as run_training
from agl_server.training.session import engine_context

Config = Annotated[Path | None, typer.Argument(help="The run's configuration (TOML).")]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN[@STEP]",
        help="A run: go on from its last checkpoint, or from that of a step, as its next restart.",
    ),
]
From = Annotated[
    list[Path],
    typer.Option(
        "--from",
        metavar="RUN|FILE",
        help="Train on what was recorded there, a run or a file that `agl import` takes, instead of [tasks.train]. It "
        "can be repeated.",
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
    set_: Set = [],
    from_: From = [],
    resume: Resume = None,
    engine: EngineName = None,
    dry_run: DryRun = False,
) -> None:
    """Train the agent that CONFIG names, and print the reward before and after.

    A new run begins with one rollout of the agent, which is shown; if that fails, and others in the same way, training
    does not begin. At the end it says what the run came to: learned, not yet, or cannot, and why. If no rollout
    finished, the exit status is 1.

    Everything runs on this machine: the server in this process, the engine and the workers in processes of their own.
    The address that is printed at the start shows the run in a browser. Ctrl-C stops the run and saves a checkpoint
    (exit status 130; 143 after SIGTERM). The run's folder holds the store, metrics.jsonl, checkpoints and summary.json.

    --resume goes on with a run. From an earlier checkpoint (--resume calc@3, calc@best) it replaces what came
    later: later checkpoints and metrics are removed. Changes by --set are listed, and hold from then on.

    Workers may run on other machines too (`agl worker CONFIG --server URL`): with --set workers.processes=0 there is
    none here. To be reached by them, give it an address of this machine (--set server.host=ADDRESS) and set
    AGL_WORKER_KEY here and there. Traffic is not encrypted.
    """
    checkpoint = None
    recorded = []
    if config is not None and resume is None:
        file = config
        if from_:
            sources = [str((path if is_recording(path) else find_run(path)).resolve()) for path in from_]
            recorded = [f"tasks.train={{source = 'recorded', run = {json.dumps(sources)}}}"]
    elif resume is not None and config is None and not from_:
        folder, step = _find_checkpoint(str(resume))
        file = folder / CONFIG_FILE
        if step is not None and (checkpoint := Checkpoints(folder / CHECKPOINTS, keep=1).meant_by(step)) is None:
            raise ConfigError(f"{resume}: a run is resumed from a checkpoint. To begin at step 0, start a new run.")
    else:
        raise ConfigError(
            "Name either a configuration file (which --from is for) or, with --resume, a run's folder. See agl train "
            "--help."
        )
    loaded = load(file, [*recorded, *set_, *([] if engine is None else [f"engine.name={engine}"])], seed)
    if dry_run:
        engine_of_run: Engine = loaded.engine.build(engine_context(loaded, loaded.config.runs / loaded.config.name))
        typer.echo(engine_of_run.describe(), nl=False)
        return
    run_dir = new_run_dir(loaded) if resume is None else file.parent
    console = Screen()
    console.print(f"run folder: {run_dir}")
    is_new = resume is None
    training = partial(run_training, loaded, run_dir, resume=not is_new, checkpoint=checkpoint, look=is_new)
    train_and_report(loaded, run_dir, training, console)


def _find_checkpoint(target: str) -> tuple[Path, str | None]:
    """A run's folder, and the checkpoint of RUN@STEP or RUN/checkpoints/STEP, or None. ConfigError without a run."""
    path = Path(target)
    run, at, step = target.rpartition("@")
    if at and not path.is_dir():
        return find_run(Path(run)), step
    if path.parent.name == CHECKPOINTS:
        return find_run(path.parent.parent), path.name
    return find_run(path), None


def train_and_report(
    loaded: LoadedConfig,
    run_dir: Path,
    training: Callable[[ConsoleObserver], Awaitable[Summary]],
    console: Screen,
    go_on: str | None = None,
) -> None:
    """Train while the browser can show the run, and print the result (see `print_summary`)."""
    operator_key = os.environ.get(OPERATOR_KEY)  # The server takes it out of the environment.

    async def work() -> Summary:
        async with show_in_browser(run_dir, loaded.config.server, operator_key) as address:
            return await training(ConsoleObserver(console, loaded.config.train.steps, address))

    summary = run(work())
    summary.write()
    print_summary(console, summary, go_on)
    if summary.stopped_by is not None:
        raise typer.Exit(128 + summary.stopped_by)
    if summary.verdict is not None and summary.verdict.failed:
        raise typer.Exit(1)


def print_summary(console: Screen, summary: Summary, go_on: str | None = None) -> None:
    """Print the result of a run; `go_on` is the command that resumes it, by default `agl train --resume`."""
    state = summary.state
    rewards = table("held-out set", "sampling", numbers=("before", "after"))
    for name in summary.sets:
        by_mode = summary.rewards(name)
        for mode, before in by_mode["before"].items():
            rewards.add_row(name, mode, score(before), score(by_mode["after"][mode]))
    if summary.sets:
        console.print(rewards)
    console.print(f"verdict: {summary.verdict.text if summary.verdict else 'none, for no step was made'}", style="bold")
    transitions = counts(summary.steps, "transitions/")
    idle = transitions["without_advantage"]
    idle_note = f" ({idle} of them with an advantage of 0)" if idle else ""

    best = "" if summary.best in (None, summary.checkpoint) else f"; with the best evaluation: {summary.best}"

    def listed(prefix: str) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(counts(summary.steps, prefix).items())) or "none"

    share = summary.exact_share
    proof = "" if share is None else f": {listed('proved/')}; proved to be what was sampled: {share:.2%}"
    facts = [
        ("steps", f"{state.step}, in {state.seconds:.0f} s{', stopped early' if summary.stopped_by else ''}"),
        ("memory", f"{state.peak_rss_bytes / 2**20:.0f} MiB at most"),
        ("rollouts", listed("ending/")),
        ("transitions", f"{transitions['kept']} trained on{idle_note}; dropped: {listed('dropped/')}"),
        ("tokens", f"{summary.proved.total()} trained on{proof}"),
        ("spent", Prices.of(state.config).describe(state.tokens)),
        ("checkpoint", f"{summary.checkpoint or 'none'}{best}"),
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


Target = Annotated[
    str,
    typer.Argument(
        metavar="RUN|NAME@STEP|CONFIG",
        help="A run (its last checkpoint), a version as calc@40 or calc@best (calc@0: before training), or a "
        "configuration file (its initial weights).",
    ),
]
Repeat = Annotated[
    int, typer.Option(min=1, help="Rollouts of each task where replies are sampled; from 2 on, pass@k and pass^k.")
]
Against = Annotated[
    str | None, typer.Option(metavar="RUN|NAME@STEP|CONFIG", help="Evaluate this too, and compare task by task.")
]
Success = Annotated[float, typer.Option(help="The least reward with which a rollout counts as solved.")]

_NAMED_TASKS = 10


def evaluate(
    target: Target,
    repeat: Repeat = 1,
    against: Against = None,
    success: Success = 1.0,
    harness: HarnessName = None,
    seed: Seed = None,
    set_: Set = [],
    as_json: AsJson = False,
) -> None:
    """Evaluate on every held-out set, greedy and sampled, and print the rewards.

    They are also a line of the run's metrics.jsonl.
    """
    folder, checkpoint = _resolve(target)
    if harness is not None:
        set_ = [f'agent={{harness = "{harness}"}}', *set_]
    loaded = load(Path(target) if folder is None else folder / CONFIG_FILE, set_, seed)
    if repeat > 1 and Mode.EVAL_SAMPLED not in loaded.config.eval.modes:
        raise ConfigError("--repeat repeats sampled replies, and eval.modes has greedy ones only.")
    if against is not None:
        _resolve(against)  # A mistake is found before anything is evaluated.
    run_dir = new_run_dir(loaded) if folder is None else folder
    console = Screen(stderr=as_json)
    observer = ConsoleObserver(console, loaded.config.train.steps)
    evaluated = run(run_evaluation(loaded, run_dir, checkpoint, observer, repeat=repeat))
    other = None if against is None else _evaluate_apart(against, repeat, seed, set_)
    solved = passes(evaluated.scores, success)
    compared = []
    if other is not None:
        before = [TaskScore(s["set"], s["mode"], s["task"], tuple(s["rewards"])) for s in other["scores"]]
        compared = compare(evaluated.scores, before, success)
        if not compared:
            raise ConfigError(f"{target} and {against} have no held-out task in common, so they cannot be compared.")
    if as_json:
        result: dict[str, Any] = {"run": run_dir, "checkpoint": checkpoint, "evaluations": evaluated.entries}
        result |= {"scores": evaluated.scores, "passes": solved}
        print_json(result if other is None else {**result, "against": other, "comparison": compared})
        return
    rewards = table("held-out set", "sampling", "score", "rollouts", "tokens", "seconds")
    for entry in evaluated.entries:
        for name, value in scores_of(entry).items():
            counts = (str(entry.get(count, "-")) for count in ("rollouts", "tokens"))
            rewards.add_row(entry["set"], name, score(value), *counts, f"{entry['seconds']:.1f}")
    console.print(rewards)
    if solved:
        tries = table("held-out set", "tasks", "k", "pass@k", "pass^k")
        for row in solved:
            estimates = _with_interval(row.pass_at), _with_interval(row.pass_all)
            tries.add_row(row.set, str(row.tasks), str(row.k), *estimates)
        console.print(tries)
        console.print("in brackets: 95% intervals, over tasks")
    for comparison in compared:
        _print_comparison(console, comparison, target, str(against))
    console.print(f"written to {run_dir / METRICS_FILE}")


def _resolve(target: str) -> tuple[Path | None, Path | None]:
    """The run's folder, None for a configuration, and the checkpoint, None for step 0."""
    if Path(target).is_file():
        return None, None
    folder, step = _find_checkpoint(target)
    checkpoints = Checkpoints(folder / CHECKPOINTS, keep=1)
    return folder, checkpoints.latest() if step is None else checkpoints.meant_by(step)


def _evaluate_apart(target: str, repeat: int, seed: int | None, set_: list[str]) -> dict[str, Any]:
    """The JSON of `agl eval TARGET`, in a process of its own, since clients made at import belong to one server."""
    arguments = ["eval", target, "--json", f"--repeat={repeat}", *(f"--set={override}" for override in set_)]
    if seed is not None:
        arguments.append(f"--seed={seed}")
    done = subprocess.run([sys.executable, "-P", "-m", "agl_core", *arguments], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)  # It has said why.
    evaluated: dict[str, Any] = json.loads(done.stdout)
    return evaluated


def _print_comparison(console: Screen, comparison: Comparison, now: str, before: str) -> None:
    gained, lost = comparison.gained, comparison.lost
    difference = _with_interval(comparison.difference, signed=True)
    console.print(
        f"{comparison.set}, {comparison.mode}, {comparison.tasks} tasks: {now} − {before} = {difference}; "
        f"{len(gained)} solved more often, {len(lost)} less often (sign test: p = {comparison.p:.2g})"
    )
    for title, changes in (("solved more often", gained), ("less often", lost)):
        if changes:
            named = ", ".join(f"{c.task} ({c.before:.2f} → {c.now:.2f})" for c in changes[:_NAMED_TASKS])
            more = f" and {len(changes) - _NAMED_TASKS} more (--json has all)" if len(changes) > _NAMED_TASKS else ""
            console.print(f"  {title}: {named}{more}")


def _with_interval(estimate: Estimate, *, signed: bool = False) -> str:
    form = "+.3f" if signed else ".3f"
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"
