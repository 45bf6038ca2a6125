"""`agl export`, `agl import`, `agl reward try`: a run's data for other tools, others' as a run, and other rewards."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.text import Text

from agl_core.cli.reward import try_ as try_rules
from agl_core.cli.screen import AsJson, Screen, Set, print_json, table
from agl_core.cli.words import harmless, number, one_line, said_by, status_text
from agl_core.config.load import SCORED, load, read_config
from agl_core.config.models import RunConfig
from agl_core.errors import ConfigError, PluginError
from agl_server.commands.screen import Run, filtered
from agl_server.reading.export import Format, export_run
from agl_server.reading.importing import import_file
from agl_server.reading.rollouts import Query
from agl_server.reading.runs import RUNS, find_run
from agl_server.reading.try_rewards import Change, RolloutChange, Trial, Value, try_rewards

To = Annotated[Format, typer.Option("--to", help="The format; docs/data.md has what each carries.")]
Out = Annotated[Path, typer.Option(help="What to make: a folder with parquet, else one file, for instance sft.jsonl.")]


@filtered("step", "mode", "split", "min_reward", "max_reward", "agent", "verdict")
def export(run: Run, to: To, out: Out, *, query: Query, as_json: AsJson = False) -> None:
    """Write what was recorded of a run for other tools: tables, episodes, or conversations to train on.

    parquet is a folder with a table of transitions and one of episodes. episodes is what agl import and
    agl_core.load_episodes take. sft and preferences are what TRL's SFTTrainer and DPOTrainer take, and leave
    evaluations out unless --mode or --split asks for them. With --agent, only its own transitions are written. The
    output appears whole or not at all.

    For instance: agl export calc --to sft --min-reward 1 --out sft.jsonl
    """
    exported = asyncio.run(export_run(find_run(run), to, out, query))
    if as_json:
        print_json(exported)
        return
    typer.echo(f"{exported.out}: {', '.join(f'{count} {name}' for name, count in exported.rows.items())}")
    for reason, count in exported.left_out.items():
        if count:
            typer.echo(f"left out: {count} rollouts that are {reason}")


File = Annotated[
    Path,
    typer.Argument(
        help="Conversations, pairs of them, or episodes, as JSON Lines, a JSON array, CSV, Parquet, or the folder of a "
        "saved Hugging Face dataset."
    ),
]
Name = Annotated[str, typer.Option(help="The run's folder below ./runs.")]


def import_(file: File, name: Name = "imported", as_json: AsJson = False) -> None:
    """Make a run of recorded conversations, to look at, to score, to export and to train on.

    Rows in OpenAI's chat format, of ShareGPT, Alpaca, TRL (prompt and completion, preferences) and KTO are read. Each
    assistant message is a call: what comes before it is its prompt. Beside `messages` and `tools` a row may have
    `id` (rows with the same id are rollouts of one task), `split`, `reward` and `model`; any other key is the task's
    metadata, which reward rules see. If a row is wrong, it is named, and nothing is imported.
    """
    imported = import_file(file, name, RUNS)
    if as_json:
        print_json(imported)
        return
    typer.echo(f"{imported.run}: {imported.rollouts} rollouts, {imported.calls} calls")
    typer.echo(f"next: agl rollouts {imported.run}")


Configs = Annotated[
    list[str],
    typer.Argument(
        help="The configuration to try: that of the run, with other rewards or credit. Or, on a file of episodes, "
        "reward rules: a plugin file (.py), or the names of installed ones.",
    ),
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
        help="The folder of a run or of what `agl run` recorded, or a file that `agl import` takes; by default the "
        "newest run of CONFIG's name.",
    ),
]
TrainingStep = Annotated[
    int | None,
    typer.Option(
        "--step",
        help="All rollouts of this training step; by default the last complete step, or all that was recorded without "
        "training.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask whether the rules of CONFIG may run.")]

reward = typer.Typer(help="Try other rewards and credit on what was recorded.", no_args_is_help=True)


@reward.command("try")
def try_(
    config: Configs,
    rollout: Ids = [],
    step: TrainingStep = None,
    run: RunFolder = None,
    set_: Set = [],
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Show what CONFIG's reward and credit rules would make of recorded rollouts.

    No agent and no engine runs, and nothing is written. The rules score the recorded calls, tool results and results;
    what the agent itself reported stays as recorded. Credit sees each rollout with its whole group, as in training.
    Evaluations, and what was recorded without training, get rewards and no credit.
    A star marks what changes. A reward rule that fails is named, and ends the command with status 2.

    The rules run with your rights, and so does the code of CONFIG's plugin files: it asks first.

    For instance: agl reward try train.toml --set credit.name=discounted --rollout s4-g1-m0
    """
    file = Path(config[0])
    names = [name for name in map(Path, config) if name.suffix == ".py" or not (name.suffix or name.is_file())]
    if len(config) > max(1, len(names)):
        raise ConfigError("Give one configuration, or nothing but reward rules.")
    if names:
        if run is None or run.is_dir() or rollout or step is not None:
            raise ConfigError(
                f"{file} is no configuration. Without one, rules are tried on a file of episodes: --run episodes.jsonl"
            )
        try_rules(config, run, set_, as_json)
        return
    if rollout and step is not None:
        raise ConfigError("Name either rollouts (--rollout) or a step (--step), not both.")
    if not yes:
        _ask(file, read_config(file, set_))
    loaded = load(file, set_, needs=SCORED)
    trial = try_rewards(loaded, file, run, rollout, step)
    if as_json:
        print_json(trial)
    else:
        screen = Screen()
        for plugin in loaded.config.plugin_files:
            if not plugin.is_file():
                screen.print(f"caution: the plugin file {plugin} is not there, so its hooks are not called")
        _print_trial(screen, trial, in_full=bool(rollout))
    if trial.failures:
        heading = "Reward rules failed. Training would drop what a rule with a weight fails on:"
        raise PluginError("\n  ".join([heading, *trial.failures]))


def _ask(file: Path, config: RunConfig) -> None:
    """Ask whether the rules may run; ConfigError without a terminal."""
    files = "".join(f", and of {plugin}" for plugin in config.plugin_files)
    runs = f"Trying runs the code of the rules in {file}{files}, with your rights."
    if not sys.stdin.isatty():
        raise ConfigError(f"{runs} If you trust them, say so: --yes.")
    typer.confirm(f"{harmless(runs)} Do you trust them?", abort=True, err=True)


def _print_trial(screen: Screen, trial: Trial, in_full: bool) -> None:
    screen.print(f"recorded in: {trial.run}")
    if trial.unfinished:
        screen.print(f"{trial.unfinished} rollouts of their groups are not done; credit is computed without them")
    for change in trial.rollouts:
        if change.changed or in_full:
            _print_rollout(screen, change)
        else:
            screen.print(f"rollout {change.episode.rollout}  unchanged, reward {_arrow(change.terminal)}")
    changed = sum(change.changed for change in trial.rollouts)
    before, after = _value(trial.mean_reward.before), _value(trial.mean_reward.after)
    screen.print(f"\n{changed} of {len(trial.rollouts)} rollouts change; mean reward {before} → {after}", style="bold")


def _print_rollout(screen: Screen, change: RolloutChange) -> None:
    episode = change.episode
    heading = f"\nrollout {episode.rollout}  task {one_line(episode.task.id, 40)}  {episode.ending.value}"
    screen.print(heading, style="bold")
    rows = table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows.add_column("turn", no_wrap=True)
    rows.add_column("agent, tools, rewards", overflow="fold")
    for column in ("reward", "credit"):
        rows.add_column(column, no_wrap=True)

    def row(turn: str, text: str, *changes: Change) -> None:
        cells = [Text(_arrow(value), style="yellow" if value.changed else "") for value in changes]
        rows.add_row(Text(turn), Text(text), *cells)

    for transition, its_change in zip(episode.transitions, change.transitions, strict=True):
        agent = one_line(transition.agent or "unnamed agent", 60)
        results = transition.tool_results
        tools = ", ".join(f"{one_line(r.tool, 40)} {status_text(r)} ({said_by(r)})" for r in results)
        credit = [its_change.credit] if episode.mode.trains else []
        row(str(transition.turn), f"{agent}: {tools}" if tools else agent, its_change.reward, *credit)
        for part in its_change.rewards:
            row("", f"  {one_line(part.name, 80)} (by {one_line(part.source, 40)})", part)
    rows.add_section()
    row("end", "terminal reward", change.terminal)
    for part in change.rewards:
        row("", f"  {one_line(part.name, 80)} (by {one_line(part.source, 40)})", part)
    screen.print(rows)


def _arrow(change: Change) -> str:
    return f"{_value(change.before)} → {_value(change.after)} *" if change.changed else _value(change.after)


def _value(value: Value) -> str:
    return "-" if value is None else value if isinstance(value, str) else number(value)
