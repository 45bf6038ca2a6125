"""`agl eval`: evaluate a run's checkpoint, or the initial weights of a configuration; compare two of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agl_core.analysis.text.words import score
from agl_core.cli.shared.options import AsJson, Seed, Set
from agl_core.cli.shared.text import print_json
from agl_core.errors import ConfigError
from agl_core.types import Mode

if TYPE_CHECKING:
    from agl_core.analysis.comparisons.repeated import Comparison, Estimate, Passes
    from agl_core.cli.shared.screen import Screen
    from agl_core.training.evaluate import Evaluated, TaskScore

Target = Annotated[
    str,
    typer.Argument(
        metavar="RUN|NAME@STEP|CONFIG",
        help="A run's folder, a version as calc@40 or calc@best (calc@0: before training), or a configuration file "
        "(its initial weights).",
    ),
]
Step = Annotated[
    int | None, typer.Option(min=0, help="The step of the checkpoint, if RUN is a folder; by default the last one.")
]
Repeat = Annotated[
    int, typer.Option(min=1, help="Rollouts of each task where replies are sampled; from 2 on, pass@k and pass^k.")
]
Against = Annotated[
    str | None, typer.Option(metavar="RUN|NAME@STEP|CONFIG", help="Evaluate this too, and compare task by task.")
]
Success = Annotated[float, typer.Option(help="The least reward with which a rollout counts as solved.")]

_SHOWN = 10
"""Tasks that are listed by name."""


def evaluate(
    target: Target,
    step: Step = None,
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
    from agl_core.analysis.comparisons.repeated import compare, passes
    from agl_core.cli.shared.screen import ConsoleObserver, Screen
    from agl_core.config import CONFIG_FILE, check, load
    from agl_core.server.listening import run
    from agl_core.training.metrics import METRICS_FILE
    from agl_core.training.run import evaluate as run_evaluation
    from agl_core.training.server import new_run_dir

    folder, checkpoint = _place(target, step)
    loaded = load(Path(target) if folder is None else folder / CONFIG_FILE, set_, seed)
    check(loaded)
    if repeat > 1 and Mode.EVAL_SAMPLED not in loaded.config.eval.modes:
        raise ConfigError("--repeat repeats sampled replies, and eval.modes has greedy ones only.")
    if against is not None:
        _place(against, None)  # A mistake is found before anything is evaluated.
    run_dir = new_run_dir(loaded) if folder is None else folder
    console = Screen(stderr=as_json)
    observer = ConsoleObserver(console, loaded.config.train.steps)
    now = run(run_evaluation(loaded, run_dir, checkpoint, observer, repeat=repeat))
    other = None if against is None else _evaluated_apart(against, repeat, seed, set_)
    solved = passes(now.scores, success)
    compared = [] if other is None else compare(now.scores, _scores(other), success)
    if other is not None and not compared:
        raise ConfigError(f"{target} and {against} have no held-out task in common, so they cannot be compared.")
    if as_json:
        more = {} if other is None else {"against": other, "comparison": compared}
        found = {"run": run_dir, "checkpoint": checkpoint, "evaluations": now.entries, "scores": now.scores}
        print_json(found | {"passes": solved} | more)
        return
    _print_rewards(console, now)
    if solved:
        _print_passes(console, solved)
    for each in compared:
        _print_comparison(console, each, target, str(against))
    console.print(f"written to {run_dir / METRICS_FILE}")


def _evaluated_apart(target: str, repeat: int, seed: int | None, set_: list[str]) -> dict[str, Any]:
    """What `agl eval TARGET --json` prints. A process of its own: what agents make at import belongs to one server."""
    program = "from agl_core.cli import main; main()"
    arguments = ["eval", target, "--json", f"--repeat={repeat}", *(f"--set={each}" for each in set_)]
    if seed is not None:
        arguments.append(f"--seed={seed}")
    done = subprocess.run([sys.executable, "-P", "-c", program, *arguments], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)  # It has said why.
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _scores(printed: dict[str, Any]) -> list[TaskScore]:
    from agl_core.training.evaluate import TaskScore

    return [TaskScore(each["set"], each["mode"], each["task"], tuple(each["rewards"])) for each in printed["scores"]]


def _place(target: str, step: int | None) -> tuple[Path | None, Path | None]:
    """The run's folder and the checkpoint; without a folder it is a configuration, without a checkpoint step 0."""
    from agl_core.analysis.runs import find_run
    from agl_core.training.checkpoints import CHECKPOINTS, Checkpoints

    if Path(target).is_file():
        return None, None
    if "@" in target and not Path(target).is_dir():
        if step is not None:
            raise ConfigError(f"'{target}' names a step already: leave out --step.")
        name, _, which = target.rpartition("@")
        folder = find_run(Path(name))
        return folder, Checkpoints(folder / CHECKPOINTS, keep=1).meant_by(which)
    folder = find_run(Path(target))
    checkpoints = Checkpoints(folder / CHECKPOINTS, keep=1)
    return folder, checkpoints.latest() if step is None else checkpoints.named(checkpoints.path(step).name)


def _print_rewards(console: Screen, found: Evaluated) -> None:
    from rich.table import Table

    table = Table("held-out set", "sampling", "reward", "rollouts", "seconds")
    for each in found.entries:
        table.add_row(each["set"], each["mode"], score(each["reward"]), str(each["rollouts"]), f"{each['seconds']:.1f}")
    console.print(table)


def _print_passes(console: Screen, solved: list[Passes]) -> None:
    from rich.table import Table

    table = Table("held-out set", "tasks", "k", "pass@k", "pass^k")
    for each in solved:
        estimates = _with_interval(each.pass_at), _with_interval(each.pass_all)
        table.add_row(each.set, str(each.tasks), str(each.k), *estimates)
    console.print(table)
    console.print("in brackets: 95% intervals, over tasks")


def _print_comparison(console: Screen, each: Comparison, now: str, before: str) -> None:
    difference = _with_interval(each.difference, signed=True)
    console.print(
        f"{each.set}, {each.mode}, {each.tasks} tasks: {now} − {before} = {difference}; {len(each.gained)} solved more "
        f"often, {len(each.lost)} less often (sign test: p = {each.p:.2g})"
    )
    for what, changes in (("solved more often", each.gained), ("less often", each.lost)):
        if changes:
            named = ", ".join(f"{change.task} ({change.before:.2f} → {change.now:.2f})" for change in changes[:_SHOWN])
            more = f" and {len(changes) - _SHOWN} more (--json has all)" if len(changes) > _SHOWN else ""
            console.print(f"  {what}: {named}{more}")


def _with_interval(found: Estimate, *, signed: bool = False) -> str:
    form = "+.3f" if signed else ".3f"
    return f"{found.value:{form}} [{found.low:{form}}, {found.high:{form}}]"
