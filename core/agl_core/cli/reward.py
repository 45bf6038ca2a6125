"""`agl reward try`: another reward or credit configuration on recorded rollouts, without running an agent."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agl_core.cli.as_json import AsJson, print_json
from agl_core.cli.captures import is_capture, open_capture
from agl_core.cli.reading import superseded
from agl_core.cli.text import number, printable, said_by
from agl_core.cli.train import Set, find_run
from agl_core.errors import ConfigError, PluginError, nearest
from agl_core.types import Ending, Episode, Rollout, RolloutState

if TYPE_CHECKING:
    from agl_core.analysis.trial import Change, RewardChange, RolloutChange, Trial, Value
    from agl_core.cli.screen import Screen
    from agl_core.config.load import ScoredConfig
    from agl_core.store.interface import Store

ConfigFile = Annotated[
    Path, typer.Argument(help="The configuration to try: that of the run, with other rewards or credit.")
]
Ids = Annotated[
    list[str],
    typer.Option(
        "--rollout", metavar="ID", help="A rollout, by its id or the beginning of it. Repeatable.", show_default=False
    ),
]
RunFolder = Annotated[
    Path | None,
    typer.Option(
        "--run",
        help="The folder of a run or of what `agl run` recorded, or a file of episodes (agl_core.save_episodes); by "
        "default the newest run of CONFIG's name.",
        show_default=False,
    ),
]
Step = Annotated[
    int | None,
    typer.Option(
        help="All rollouts of this training step; by default the last that is complete, and all of what was recorded "
        "without training.",
        show_default=False,
    ),
]

reward = typer.Typer(help="Try other rewards and credit on what was recorded.", no_args_is_help=True)


@reward.command("try")
def try_(
    config: ConfigFile,
    rollout: Ids = [],  # noqa: B006
    step: Step = None,
    run: RunFolder = None,
    set_: Set = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Show what CONFIG's reward and credit rules would make of recorded rollouts.

    No agent and no engine runs, and nothing is written. The rules judge the recorded calls, tool results and results;
    what the agent itself reported stays as recorded. Credit sees each rollout with its whole group, as in training;
    evaluations, and what was recorded without training, get rewards and no credit.
    A star marks what changes. A reward rule that fails is named, and ends the command with status 2.

    For instance: agl reward try train.toml --set credit.name=discounted --rollout s4-g1-m0
    """
    from agl_core.analysis.trial import try_on_episodes, try_rewards
    from agl_core.cli.screen import Screen
    from agl_core.config.check import check
    from agl_core.config.load import load_for_scoring

    if rollout and step is not None:
        raise ConfigError("Name either rollouts (--rollout) or a step (--step), not both.")
    loaded = load_for_scoring(config, set_)
    check(loaded)
    is_file = run is not None and run.is_file()
    folder = run if run is not None and is_file else _run_of(config, loaded) if run is None else find_run(run)

    async def trying() -> Trial:
        if is_file:
            return await try_on_episodes(loaded, _chosen_episodes(folder, rollout, step))
        store: Store = open_capture(folder, True) if is_capture(folder) else loaded.store.build(folder, True)
        async with store:
            return await try_rewards(store, loaded, await _chosen(store, folder, rollout, step))

    trial = asyncio.run(trying())
    if as_json:
        print_json({"run": folder, **_described(trial)})
    else:
        console = Screen()
        for file in loaded.config.plugin_files:
            if not file.is_file():
                console.print(f"caution: the plugin file {file} is not there, so its hooks are not called")
        _print_trial(console, folder, trial, in_full=bool(rollout))
    if trial.failures:
        raise PluginError(
            "\n  ".join(
                ["Reward rules failed. Training would drop what a rule with a weight fails on:", *trial.failures]
            )
        )


def _print_trial(console: Screen, folder: Path, trial: Trial, in_full: bool) -> None:
    console.print(f"recorded in: {folder}")
    for group, missing in trial.incomplete.items():
        console.print(f"group {group}: {missing} of its rollouts are not done; credit is computed without them")
    for change in trial.rollouts:
        _print_rollout(console, change, in_full)
    changed = sum(each.changed for each in trial.rollouts)
    mean = trial.mean_reward()
    console.print(
        f"\n{changed} of {len(trial.rollouts)} rollouts change; mean reward {_number(mean.before)} → "
        f"{_number(mean.after)}",
        style="bold",
    )


def _described(trial: Trial) -> dict[str, Any]:
    """The same for programs."""

    def change(each: Change) -> dict[str, Any]:
        return {"before": each.before, "after": each.after, "changed": each.changed}

    def rewards(parts: Sequence[RewardChange]) -> list[dict[str, Any]]:
        return [{"name": part.name, "source": part.source, **change(part.value)} for part in parts]

    return {
        "rollouts": [
            {
                "rollout": each.episode.rollout,
                "task": each.episode.task.id,
                "ending": each.episode.ending,
                "changed": each.changed,
                "terminal": change(each.terminal),
                "rewards": rewards(each.components),
                "left_out": each.left_out,
                "transitions": [
                    {
                        "turn": of.transition.turn,
                        "agent": of.transition.agent,
                        "call": of.transition.key.call,
                        "choice": of.transition.key.choice,
                        "reward": change(of.reward),
                        "credit": change(of.credit),
                        "rewards": rewards(of.rewards),
                    }
                    for of in each.transitions
                ],
            }
            for each in trial.rollouts
        ],
        "mean_reward": change(trial.mean_reward()),
        "incomplete_groups": trial.incomplete,
        "failures": trial.failures,
    }


def _chosen_episodes(file: Path, ids: Sequence[str], step: int | None) -> list[Episode]:
    """The episodes of a file to try."""
    from agl_core.capture import load_episodes

    every = load_episodes(file)
    for each in ids:
        if not any(episode.rollout.startswith(each) for episode in every):
            raise ConfigError(f"{file} has no episode '{each}'. {_close(each, [e.rollout for e in every])}")
    chosen = [e for e in every if (not ids or e.rollout.startswith(tuple(ids))) and step in (None, e.step)]
    if not chosen:
        raise ConfigError(f"{file} has no episode" + ("." if step is None else f" of step {step}."))
    return chosen


def _run_of(file: Path, loaded: ScoredConfig) -> Path:
    """The run that has this file as its configuration, else the newest of the configuration's name."""
    from agl_core.config.load import CONFIG_FILE
    from agl_core.wire.keys import SERVER_FILE

    runs, name = loaded.config.runs, loaded.config.name
    if file.name == CONFIG_FILE and any((file.parent / made).exists() for made in ("store.sqlite", SERVER_FILE)):
        return file.parent
    of_name = re.compile(re.escape(name) + r"(-\d+)?")
    folders = [path.parent for path in runs.glob(f"*/{CONFIG_FILE}")]
    found = [folder for folder in folders if of_name.fullmatch(folder.name)]
    if not found:
        raise ConfigError(
            f"There is no run '{name}' below {runs}. {nearest(name, (folder.name for folder in folders))} "
            f"Name a run's folder with --run, or train first: agl train {file}."
        )
    return max(found, key=lambda folder: (folder / CONFIG_FILE).stat().st_mtime)


async def _chosen(store: Store, folder: Path, ids: Sequence[str], step: int | None) -> list[Rollout]:
    """The rollouts to try."""
    recorded = await store.rollouts()
    if ids:
        found = {r.id: r for r in [await _rollout(store, folder, recorded, each) for each in ids]}
        return list(found.values())
    every = [r for r in recorded if r.mode.trains]
    if step is None and recorded and not every:
        return [r for r in recorded if r.state is RolloutState.DONE and r.counted_attempt is not None]
    runs = await store.runs()
    by_step: dict[int, list[Rollout]] = {}
    for rollout in every:
        if not superseded(rollout, runs):
            by_step.setdefault(rollout.step, []).append(rollout)
    if step is not None:
        if step not in by_step:
            steps = f"{min(by_step)} to {max(by_step)}" if by_step else "none"
            raise ConfigError(f"{folder} has no training rollouts of step {step}. Its training steps: {steps}.")
        chosen = by_step[step]
        if not _complete(chosen):
            raise ConfigError(
                f"Step {step} of {folder} did not come to its end. Wait for it, choose an earlier step, or name "
                f"rollouts that are done: agl rollouts {folder} --step {step}."
            )
        return chosen
    complete = [number for number, of_step in by_step.items() if _complete(of_step)]
    if not complete:
        raise ConfigError(f"{folder} has no training step that came to its end. See agl rollouts {folder}.")
    return by_step[max(complete)]


def _complete(rollouts: Sequence[Rollout]) -> bool:
    return all(r.state is RolloutState.DONE and r.ending is not Ending.CANCELLED for r in rollouts)


async def _rollout(store: Store, folder: Path, recorded: Sequence[Rollout], prefix: str) -> Rollout:
    """A rollout that the user names; ConfigError says why it cannot be tried."""
    if not any(r.id.startswith(prefix) for r in recorded):
        raise ConfigError(
            f"{folder} has no rollout '{prefix}'. {_close(prefix, [r.id for r in recorded])}See agl rollouts {folder}."
        )
    found = await store.rollout(prefix)
    if found.state is not RolloutState.DONE:
        raise ConfigError(f"{found.id} is not done, it is {found.state.value}. Try it when it is, or name another.")
    if found.counted_attempt is None:
        ending = found.ending.value if found.ending else "stopped"
        raise ConfigError(f"{found.id} never finished (it was {ending}), so there is nothing to judge. Name another.")
    return found


def _close(name: str, known: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(near)}? " if near else ""


def _print_rollout(console: Screen, change: RolloutChange, in_full: bool) -> None:
    """A table of what there is and would be; one line for an unchanged rollout, unless `in_full`."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    episode = change.episode
    if not (change.changed or in_full):
        console.print(f"rollout {episode.rollout}  unchanged, reward {_arrow(change.terminal)}")
        return
    task = printable(episode.task.id, 40)
    console.print(f"\nrollout {episode.rollout}  task {task}  {episode.ending.value}", style="bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("turn", no_wrap=True)
    table.add_column("agent, tools, rewards", overflow="fold")
    table.add_column("reward", no_wrap=True)
    table.add_column("credit", no_wrap=True)

    def row(turn: str, what: str, reward: Change | None, credit: Change | None = None) -> None:
        cells = [Text(turn), Text(what)]
        for each in (reward, credit):
            style = "yellow" if each is not None and each.changed else ""
            cells.append(Text("" if each is None else _arrow(each), style=style))
        table.add_row(*cells)

    for each in change.transitions:
        transition = each.transition
        agent = printable(transition.agent or "unnamed agent", 60)
        tools = ", ".join(f"{printable(o.tool, 40)} {o.status.value} ({said_by(o)})" for o in transition.tool_results)
        credit = each.credit if episode.mode.trains else None
        row(str(transition.turn), f"{agent}: {tools}" if tools else agent, each.reward, credit)
        for part in each.rewards:
            row("", f"  {_provenance(part)}", part.value)
    if change.left_out:
        row("", f"{change.left_out} transitions that were used in training are left out by a plugin *", None)
    table.add_section()
    row("end", "terminal reward", change.terminal)
    for part in change.components:
        row("", f"  {_provenance(part)}", part.value)
    console.print(table)


def _provenance(reward: RewardChange) -> str:
    return f"{printable(reward.name, 80)} (by {printable(reward.source, 40)})"


def _arrow(change: Change) -> str:
    if not change.changed:
        return _number(change.after)
    return f"{_number(change.before)} → {_number(change.after)} *"


def _number(value: Value) -> str:
    return "-" if value is None else value if isinstance(value, str) else number(value)
