"""`agl eval`: evaluate a run's checkpoint, or the initial weights of a configuration; compare two of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from agl_core.cli.screen import AsJson, ConsoleObserver, Screen, Seed, Set, print_json, table
from agl_core.config.check import check
from agl_core.config.load import CONFIG_FILE, load
from agl_core.errors import ConfigError
from agl_core.reading.evaluations import Comparison, Estimate, compare, passes
from agl_core.reading.runs import find_checkpoint
from agl_core.reading.words import score
from agl_core.server.listening import run
from agl_core.training.checkpoints import CHECKPOINTS, Checkpoints
from agl_core.training.evaluation import TaskScore
from agl_core.training.metrics import METRICS_FILE
from agl_core.training.run import evaluate as run_evaluation
from agl_core.training.server import new_run_dir
from agl_core.types import Mode

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
    seed: Seed = None,
    set_: Set = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Evaluate on every held-out set, greedy and sampled, and print the rewards.

    They are also a line of the run's metrics.jsonl.
    """
    folder, checkpoint = _resolve(target)
    loaded = load(Path(target) if folder is None else folder / CONFIG_FILE, set_, seed)
    check(loaded)
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
    rewards = table("held-out set", "sampling", "reward", "rollouts", "seconds")
    for entry in evaluated.entries:
        numbers = score(entry["reward"]), str(entry["rollouts"]), f"{entry['seconds']:.1f}"
        rewards.add_row(entry["set"], entry["mode"], *numbers)
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
    """The run's folder and the checkpoint; without a folder it is a configuration, without a checkpoint step 0."""
    if Path(target).is_file():
        return None, None
    folder, step = find_checkpoint(target)
    checkpoints = Checkpoints(folder / CHECKPOINTS, keep=1)
    return folder, checkpoints.latest() if step is None else checkpoints.meant_by(step)


def _evaluate_apart(target: str, repeat: int, seed: int | None, set_: list[str]) -> dict[str, Any]:
    """The JSON of `agl eval TARGET`. A process of its own: what agents make at import belongs to one server."""
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
