"""Measures what each contribution is worth, and writes docs/experiments.md.

    python docs/make_experiments.py                 # what is missing in docs/experiments.json, then the page
    python docs/make_experiments.py --minutes 30    # start no further run after half an hour; go on later
    python docs/make_experiments.py --only beds/decisive
    python docs/make_experiments.py --write         # no run, the page alone

It can be interrupted at any time; see runs.py. The beds are described in examples/beds/README.md.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from runs import ROOT, Experiment, Result, Results, command_line, mean_and_range

from agl_core.builtin.credit import discounted, identical, immediate, stepwise
from agl_core.config.load import load
from agl_core.learning import build_episode
from agl_core.training.run import CONFIG_FILE
from agl_core.types import AttemptKey, Call, Episode, Mode, Reward, ToolResult
from agl_rewards.air import air

sys.path.append(str(ROOT / "examples" / "beds"))
from bed_plugin import earned, true_credit
from beds import Bed

RESULTS = Results(Path(__file__).with_name("experiments.json"))
PAGE = Path(__file__).with_name("experiments.md")
SEEDS = range(5)

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
LAST_ONLY = "last call only"
"""What `immediate` is where no call earns anything by itself."""
CREDIT: dict[Bed, Sequence[str]] = {
    Bed.ADDITIVE: ("identical", "immediate", "stepwise", "reward-to-go"),
    Bed.DECISIVE: ("identical", "stepwise", "discounted, γ = 0.9", "immediate"),
    Bed.RECOVERABLE: ("identical", "air, α = 0.2", "stepwise", "discounted, γ = 0.9", "immediate"),
}
"""The rules that differ on each bed: where only the end earns, reward-to-go is identical; without tools, air is.

After `identical` comes what theory prefers, so that an interrupted run has compared the two.
"""


def experiments() -> Iterator[Experiment]:
    """Seed by seed, and row by row of all beds."""
    for seed in SEEDS:
        for row in itertools.zip_longest(*CREDIT.values()):
            for bed, label in zip(CREDIT, row, strict=True):
                if label is None:
                    continue
                bedded = (f"tasks.train.bed={bed}", f"tasks.eval.bed={bed}")
                yield Experiment("beds", f"{bed}/{label}", (*bedded, *RULES[label][0]), seed)


def learned(run: Path) -> Result:
    """What games earned before, while and after training, and how well the first step's credit fits the truth."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if line["kind"] == "eval"]
    before, after = (
        {mode: line[f"eval/{mode}/reward/total"] for mode in ("greedy", "sampled")}
        for line in (evaluated[0], evaluated[-1])
    )
    training = [line["reward/total"] for line in lines if line["kind"] == "train"]
    return {
        "correlations": correlations(asyncio.run(_first_step(run))),
        "reward": {"before": before, "after": after},
        "train_rewards": training,
    }


async def _first_step(run: Path) -> list[Episode]:
    """The episodes of the first step, with their rewards."""
    async with load(run / CONFIG_FILE).store.build(run, True) as store:
        rollouts = {each.id: each for each in await store.rollouts(mode=Mode.TRAIN) if each.step == 1}
        attempts = {
            AttemptKey(each.rollout, each.attempt): each
            for rollout in rollouts.values()
            for each in await store.attempts(rollout.id)
            if each.attempt == rollout.counted_attempt
        }
        calls: dict[AttemptKey, list[Call]] = {key: [] for key in attempts}
        for call in await store.calls(attempts):
            calls[call.key].append(call)
        used: dict[AttemptKey, list[ToolResult]] = {key: [] for key in attempts}
        for tool_result in await store.tool_results(attempts):
            used[AttemptKey(tool_result.rollout, tool_result.attempt)].append(tool_result)
    return [
        _scored(build_episode(rollouts[each.rollout], each, calls[key], used[key], ()))
        for key, each in attempts.items()
    ]


def _scored(episode: Episode) -> Episode:
    found = earned(episode)
    if not isinstance(found, Mapping):
        return replace(episode, terminal=found)
    transitions = tuple(
        replace(t, rewards=(Reward(episode.rollout, episode.attempt, "earned", found[t.key], "earned", t.key.call),))
        for t in episode.transitions
    )
    return replace(episode, transitions=transitions, terminal=0.0)


def correlations(episodes: Sequence[Episode]) -> dict[str, float]:
    """Of each rule's credit, from which the mean of the group's rollouts is subtracted, with what calls were worth."""
    by_group: dict[str, list[Episode]] = {}
    for episode in episodes:
        by_group.setdefault(episode.group, []).append(episode)
    worths = [worth for group in by_group.values() for each in group for worth in true_credit(each)]
    found = {}
    for label, (_, rule) in RULES.items():
        centred: list[float] = []
        for group in by_group.values():
            values = rule(group)
            baseline = statistics.mean(map(statistics.mean, values))
            centred += [value - baseline for of_episode in values for value in of_episode]
        if len(set(centred)) > 1:
            found[label] = statistics.correlation(centred, worths)
    return found


def agreement() -> Iterator[str]:
    """One row per rule, one column per bed: all runs of a bed begin with the same policy, so each is a measurement."""
    beds = list(CREDIT)
    found = {bed: [each["correlations"] for each in RESULTS.valid(_of(bed)) if each["correlations"]] for bed in beds}
    yield f"| credit | {' | '.join(f'{bed} ({len(found[bed])} first steps)' for bed in beds)} |"
    yield "|---" * (len(beds) + 1) + "|"
    for label in RULES:
        known = ([each[label] for each in found[bed] if label in each] for bed in beds)
        yield f"| {label} | {' | '.join(mean_and_range(each) if each else '' for each in known)} |"


def _of(bed: Bed) -> list[Experiment]:
    return [each for each in experiments() if each.label.startswith(f"{bed}/")]


def table(bed: Bed) -> Iterator[str]:
    """One row per rule; runs that are missing or out of date are left out of it."""
    head = ["credit", "seeds", "before, sampled", "after, greedy", "after, sampled", "while training"]
    head += ["CPU seconds a run"]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for label in CREDIT[bed]:
        runs = RESULTS.valid(each for each in _of(bed) if each.label == f"{bed}/{label}")
        shown = LAST_ONLY if label == "immediate" and bed is not Bed.ADDITIVE else label
        if not runs:
            yield f"| {shown} | 0 |" + " |" * (len(head) - 2)
            continue
        row = [shown, str(len(runs)), mean_and_range([each["reward"]["before"]["sampled"] for each in runs])]
        row += [mean_and_range([each["reward"]["after"][mode] for each in runs]) for mode in ("greedy", "sampled")]
        row += [mean_and_range([statistics.mean(each["train_rewards"]) for each in runs])]
        row += [f"{statistics.mean([each['cpu_seconds'] for each in runs]):.0f}"]
        yield f"| {' | '.join(row)} |"


def page() -> str:
    """docs/experiments.md: what a person wrote (experiments.head.md), then the tables."""
    parts = [PAGE.with_name("experiments.head.md").read_text().rstrip(), ""]
    parts += ["## Credit: how well it agrees with the truth", "", *agreement(), ""]
    for bed in CREDIT:
        spent = [each["cpu_seconds"] for each in RESULTS.valid(_of(bed))]
        took = f"{len(spent)} runs, {sum(spent) / 60:.0f} minutes of one core."
        parts += [f"## Credit: what the policy learns, {bed}", "", took, "", *table(bed), ""]
    return "\n".join(parts).rstrip() + "\n"


def main() -> None:
    options = command_line(__doc__)
    if not options.write:
        chosen = [each for each in experiments() if each.name.startswith(options.only)]
        RESULTS.complete(chosen, options.minutes, learned)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
