"""How well credit rules agree with the truth, on the beds of examples/beds, where it is known."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from agl_core.builtin import discounted, identical, immediate, stepwise
from agl_core.config.load import CONFIG_FILE, load
from agl_core.types import Episode, Mode, Reward
from agl_rewards.air import air
from agl_server.health.verdict import read_metrics, series
from agl_server.training.rollouts import recorded_episodes

sys.path.append(str(Path(__file__).parents[1] / "examples" / "beds"))
sys.path.append(str(Path(__file__).parents[1] / "examples"))
from bed_plugin import earned, true_credit
from measured import Result

Crediting: TypeAlias = Callable[[Sequence[Episode]], list[list[float]]]

RULES: dict[str, tuple[tuple[str, ...], Crediting]] = {
    "identical": (("credit.name=identical",), identical),
    "reward-to-go": (("credit.name=discounted", "credit.discounted.gamma=1"), partial(discounted, gamma=1.0)),
    "discounted, γ = 0.9": (("credit.name=discounted", "credit.discounted.gamma=0.9"), partial(discounted, gamma=0.9)),
    "immediate": (("credit.name=immediate",), immediate),
    "stepwise": (("credit.name=stepwise",), stepwise),
    "air, α = 0.2": (("credit.name=air", "credit.air.alpha=0.2"), partial(air, alpha=0.2)),
}
"""Each rule as a run has it, and as a function."""


def learned(run: Path) -> Result:
    """The games' earnings before, while and after training, and how well the first step's credit fits the truth."""
    lines = read_metrics(run)
    evaluated = [line.values for line in lines if line.kind == "eval"]
    before, after = (
        {mode: values[f"eval/{mode}/reward/total"] for mode in ("greedy", "sampled")}
        for values in (evaluated[0], evaluated[-1])
    )
    training = [reward for _, reward in series(lines, "train", "reward/total")]
    return {
        "correlations": correlations([_scored(e) for e in asyncio.run(first_step(run))]),
        "rewards": {"eval": {"before": before, "after": after}},
        "train_rewards": training,
    }


async def first_step(run: Path) -> list[Episode]:
    """The first step's episodes, before the policy learned anything, without rewards of rules."""
    loaded = load(run / CONFIG_FILE)
    async with loaded.store.build(run, True) as store:
        rollouts = [r for r in await store.rollouts(mode=Mode.TRAIN) if r.step == 1]
        return await recorded_episodes(store, rollouts, loaded.plugins.hook)


def _scored(episode: Episode) -> Episode:
    earnings = earned(episode)
    if not isinstance(earnings, Mapping):
        return replace(episode, terminal=earnings)
    transitions = tuple(
        replace(t, rewards=(Reward(episode.rollout, episode.attempt, "earned", earnings[t.key], "earned", t.key.call),))
        for t in episode.transitions
    )
    return replace(episode, transitions=transitions, terminal=0.0)


def correlations(episodes: Sequence[Episode]) -> dict[str, float]:
    """Of each rule's credit, from which the mean of the group's rollouts is subtracted, with what calls were worth."""
    by_group: dict[str, list[Episode]] = {}
    for episode in episodes:
        by_group.setdefault(episode.group, []).append(episode)
    worths = [worth for group in by_group.values() for e in group for worth in true_credit(e)]
    by_rule = {}
    for label, (_, rule) in RULES.items():
        centred: list[float] = []
        for group in by_group.values():
            values = rule(group)
            baseline = statistics.mean(map(statistics.mean, values))
            centred += [value - baseline for of_episode in values for value in of_episode]
        if len(set(centred)) > 1:
            by_rule[label] = statistics.correlation(centred, worths)
    return by_rule
