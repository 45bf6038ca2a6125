"""`agl reward try`: another reward or credit configuration on recorded rollouts, without running an agent."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agl_core.analysis.text.words import harmless, number, one_line, said_by, status_text
from agl_core.cli.shared.options import AsJson, Set
from agl_core.cli.shared.text import print_json
from agl_core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from agl_core.analysis.trials.trial import Change, RewardChange, RolloutChange, Trial, Value
    from agl_core.cli.shared.screen import Screen
    from agl_core.config.models import RunConfig

ConfigFile = Annotated[
    Path, typer.Argument(help="The configuration to try: that of the run, with other rewards or credit.")
]
Ids = Annotated[
    list[str],
    typer.Option(
        "--rollout",
        metavar="ID",
        help="A rollout, by its id or the beginning of it, or a group of them, by its name. Repeatable.",
    ),
]
RunFolder = Annotated[
    Path | None,
    typer.Option(
        "--run",
        help="The folder of a run or of what `agl run` recorded, or a file of episodes (agl_core.save_episodes); by "
        "default the newest run of CONFIG's name.",
    ),
]
Step = Annotated[
    int | None,
    typer.Option(
        help="All rollouts of this training step; by default the last complete step, or all that was recorded without "
        "training."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask whether the rules of CONFIG may run.")]

reward = typer.Typer(help="Try other rewards and credit on what was recorded.", no_args_is_help=True)


@reward.command("try")
def try_(
    config: ConfigFile,
    rollout: Ids = [],  # noqa: B006
    step: Step = None,
    run: RunFolder = None,
    set_: Set = [],  # noqa: B006
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Show what CONFIG's reward and credit rules would make of recorded rollouts.

    No agent and no engine runs, and nothing is written. The rules score the recorded calls, tool results and results;
    what the agent itself reported stays as recorded. Credit sees each rollout with its whole group, as in training.
    The advantage is that of GRPO: credit minus the group's mean, divided by its deviation.
    Evaluations, and what was recorded without training, get rewards and no credit.
    A star marks what changes. A reward rule that fails is named, and ends the command with status 2.

    The rules run with your rights, and so does the code of CONFIG's plugin files: it asks first.

    For instance: agl reward try train.toml --set credit.name=discounted --rollout s4-g1-m0
    """
    from agl_core.analysis.trials.trial import try_rewards
    from agl_core.cli.shared.screen import Screen
    from agl_core.config import check
    from agl_core.config.load import SCORED, load, read_config

    if rollout and step is not None:
        raise ConfigError("Name either rollouts (--rollout) or a step (--step), not both.")
    if not yes:
        _ask(config, read_config(config, set_))
    loaded = load(config, set_, needs=SCORED)
    check(loaded)
    trial = asyncio.run(try_rewards(loaded, config, run, rollout, step))
    if as_json:
        print_json(trial)
    else:
        console = Screen()
        for file in loaded.config.plugin_files:
            if not file.is_file():
                console.print(f"caution: the plugin file {file} is not there, so its hooks are not called")
        _print_trial(console, trial, in_full=bool(rollout))
    if trial.failures:
        raise PluginError(
            "\n  ".join(
                ["Reward rules failed. Training would drop what a rule with a weight fails on:", *trial.failures]
            )
        )


def _ask(file: Path, config: RunConfig) -> None:
    """Whether the rules may run; ConfigError without a terminal to ask on."""
    files = "".join(f", and of {each}" for each in config.plugin_files)
    runs = f"Trying runs the code of the rules in {file}{files}, with your rights."
    if not sys.stdin.isatty():
        raise ConfigError(f"{runs} If you trust them, say so: --yes.")
    typer.confirm(f"{harmless(runs)} Do you trust them?", abort=True, err=True)


def _print_trial(console: Screen, trial: Trial, in_full: bool) -> None:
    console.print(f"recorded in: {trial.run}")
    for group, missing in trial.incomplete_groups.items():
        console.print(f"group {group}: {missing} of its rollouts are not done; credit is computed without them")
    for change in trial.rollouts:
        _print_rollout(console, change, in_full)
    changed = sum(each.changed for each in trial.rollouts)
    console.print(
        f"\n{changed} of {len(trial.rollouts)} rollouts change; mean reward {_number(trial.mean_reward.before)} → "
        f"{_number(trial.mean_reward.after)}",
        style="bold",
    )


def _print_rollout(console: Screen, change: RolloutChange, in_full: bool) -> None:
    """A table of the values before and after; one line for an unchanged rollout, unless `in_full`."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not (change.changed or in_full):
        console.print(f"rollout {change.rollout}  unchanged, reward {_arrow(change.terminal)}")
        return
    task = one_line(change.task, 40)
    console.print(f"\nrollout {change.rollout}  task {task}  {change.ending.value}", style="bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("turn", no_wrap=True)
    table.add_column("agent, tools, rewards", overflow="fold")
    table.add_column("reward", no_wrap=True)
    table.add_column("credit", no_wrap=True)
    table.add_column("advantage", no_wrap=True)

    def row(turn: str, what: str, *changes: Change | None) -> None:
        cells = [Text(turn), Text(what)]
        for each in changes:
            style = "yellow" if each is not None and each.changed else ""
            cells.append(Text("" if each is None else _arrow(each), style=style))
        table.add_row(*cells)

    for each in change.transitions:
        agent = one_line(each.agent or "unnamed agent", 60)
        tools = ", ".join(f"{one_line(o.tool, 40)} {status_text(o)} ({said_by(o)})" for o in each.tool_results)
        of_training = (each.credit, each.advantage) if change.mode.trains else ()
        row(str(each.turn), f"{agent}: {tools}" if tools else agent, each.reward, *of_training)
        for part in each.rewards:
            row("", f"  {_provenance(part)}", part)
    if change.left_out:
        row("", f"{change.left_out} transitions that were used in training are left out by a plugin *")
    table.add_section()
    row("end", "terminal reward", change.terminal)
    for part in change.rewards:
        row("", f"  {_provenance(part)}", part)
    console.print(table)


def _provenance(reward: RewardChange) -> str:
    return f"{one_line(reward.name, 80)} (by {one_line(reward.source, 40)})"


def _arrow(change: Change) -> str:
    if not change.changed:
        return _number(change.after)
    return f"{_number(change.before)} → {_number(change.after)} *"


def _number(value: Value) -> str:
    return "-" if value is None else value if isinstance(value, str) else number(value)
