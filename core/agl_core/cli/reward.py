"""`agl reward try RULES`: reward rules, of a file or installed, on recorded episodes, wherever the core is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from agl_core import kinds
from agl_core.cli.screen import AsJson, Screen, Set, print_json, table
from agl_core.cli.words import number, one_line
from agl_core.config.load import apply_overrides
from agl_core.config.models import RewardSection, TrainSection
from agl_core.config.resolve import Problems
from agl_core.errors import ConfigError, PluginError, nearest
from agl_core.learning.rewards import ScoringRule, try_rules
from agl_core.learning.transitions import load_episodes
from agl_core.plugins import Plugins, import_file
from agl_core.types import Episode, Mode

Rules = Annotated[list[str], typer.Argument(metavar="RULES", help="A file of yours (.py), or installed rules by name.")]
EpisodesFile = Annotated[Path, typer.Option("--run", help="Episodes, as agl_core.save_episodes writes them.")]

reward = typer.Typer(help="Try rewards on what was recorded.", no_args_is_help=True)


@reward.command("try")
def try_(rules: Rules, run: EpisodesFile, set_: Set = [], as_json: AsJson = False) -> None:
    """Score recorded episodes by the reward rules of a file of yours, or by installed ones.

    They run with your rights. --set RULE.SETTING=VALUE changes a rule's setting or weight. A rule that fails is named,
    and ends the command with status 2. With agl-server installed, a configuration and a run can be given instead.

    For instance: agl reward try my_rewards.py --run episodes.jsonl --set brevity.limit=80
    """
    scored, failures = asyncio.run(try_rules(load_episodes(run), rules_of(rules, set_), TrainSection().endings))
    if as_json:
        print_json([_row(episode) for episode in scored])
    else:
        _print(Screen(), scored)
    if failures:
        raise PluginError(
            "\n  ".join(["Reward rules failed. One with a weight leaves its episodes without a reward:", *failures])
        )


def rules_of(names: Sequence[str], overrides: Sequence[str] = ()) -> list[ScoringRule]:
    """Rules of plugin files or installed, with settings from `RULE.SETTING=VALUE`. ConfigError if one is wrong."""
    components = dict[str, kinds.Component]()
    for name in names:
        if name.endswith(".py"):
            own = Plugins()  # Without those that are installed: the file may be the source of one.
            own.register(import_file(Path(name)), name)
            found = own.components(kinds.REWARD)
        else:
            found = {name: Plugins.load().component(kinds.REWARD, name, "agl reward try")}
        for rule in found.keys() & components.keys():
            if found[rule].build is not components[rule].build:
                raise ConfigError(f"Two rules are named '{rule}': {components[rule].origin}, {found[rule].origin}.")
        components |= found
    if not components:
        raise ConfigError(f"{names[0]} has no reward rule: decorate a function with @agl_core.reward_rule.")
    settings: dict[str, Any] = {}
    report = Problems(Path(names[0]), apply_overrides(settings, overrides))
    for unknown in settings.keys() - components.keys():
        report.add((unknown,), f"there is no such rule. {nearest(unknown, components)}")
    rules = []
    for name, component in components.items():
        table = report.validated(RewardSection, settings.get(name, {}), (name,))
        options = table and report.validated(component.options, table.settings, (name,), component.label)
        if table and table.rule:
            report.add((name, "rule"), "has no effect here. Name the rule as an argument.")
        elif table and options:
            modes = table.modes if "modes" in table.model_fields_set else tuple(Mode)
            rules.append(
                ScoringRule(name, component.build(options, None), table.weight, frozenset(modes), table.time_limit)
            )
    report.raise_if_any()
    return rules


def _row(episode: Episode) -> dict[str, Any]:
    return {
        "rollout": episode.rollout,
        "task": episode.task.id,
        "ending": episode.ending.value,
        "result": episode.result,
        "rewards": {reward.name: reward.value for reward in episode.rewards if reward.call is None},
        "reward": None if episode.dropped else episode.terminal,
    }


def _print(screen: Screen, episodes: Sequence[Episode]) -> None:
    rows = [_row(episode) for episode in episodes]
    names = list(dict.fromkeys(name for row in rows for name in row["rewards"]))
    shown = table("task", "result", numbers=(*names, "reward"), box=None, pad_edge=False)
    for row in rows:
        values = [row["rewards"].get(name) for name in names]
        cells = ("-" if value is None else number(value) for value in (*values, row["reward"]))
        shown.add_row(one_line(row["task"], 30), one_line(str(row["result"]), 40), *cells)
    screen.print(shown)
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    of = f" of the {len(rewards)} that have one" if 0 < len(rewards) < len(rows) else ""
    screen.print(f"{len(rows)} episodes, mean reward {number(sum(rewards) / len(rewards)) if rewards else '-'}{of}")
