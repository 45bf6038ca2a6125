"""Measures what each contribution is worth, and writes docs/experiments.md.

    python docs/make_experiments.py                 # what is missing in docs/experiments.json, then the page
    python docs/make_experiments.py --minutes 30    # start no further run after half an hour; go on later
    python docs/make_experiments.py --only beds/decisive
    python docs/make_experiments.py --write         # no run, the page alone

It can be interrupted at any time; see runs.py. The beds are described in examples/beds/README.md.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from runs import ROOT, Experiment, Result, Results, command_line, mean_and_range

from agl_core.config.load import load
from agl_core.learning import build_episode
from agl_core.training.run import CONFIG_FILE
from agl_core.types import AttemptKey, Call, Mode

sys.path.append(str(ROOT / "examples" / "beds"))
from bed_plugin import true_credit
from beds import Bed

RESULTS = Results(Path(__file__).with_name("experiments.json"))
PAGE = Path(__file__).with_name("experiments.md")
SEEDS = range(5)

RULES = {
    "identical": ("credit.name=identical",),
    "reward-to-go": ("credit.name=discounted", "credit.discounted.gamma=1"),
    "discounted, γ = 0.9": ("credit.name=discounted", "credit.discounted.gamma=0.9"),
    "immediate": ("credit.name=immediate",),
    "stepwise": ("credit.name=stepwise",),
    "air, α = 0.2": ("credit.name=air", "credit.air.alpha=0.2"),
}
LAST_ONLY = "last call only"
"""What `immediate` is where no call earns anything by itself."""
CREDIT: dict[Bed, Sequence[str]] = {
    Bed.ADDITIVE: ("identical", "reward-to-go", "immediate", "stepwise"),
    Bed.DECISIVE: ("identical", "discounted, γ = 0.9", "immediate", "stepwise"),
    Bed.RECOVERABLE: ("identical", "discounted, γ = 0.9", "immediate", "stepwise", "air, α = 0.2"),
}
"""The rules that differ on each bed: where only the end earns, reward-to-go is identical; without tools, air is."""


def experiments() -> Iterator[Experiment]:
    """Seed by seed, so that an interrupted table has all its rows first."""
    for seed in SEEDS:
        for bed, labels in CREDIT.items():
            for label in labels:
                bedded = (f"tasks.train.bed={bed}", f"tasks.eval.bed={bed}")
                yield Experiment("beds", f"{bed}/{label}", (*bedded, *RULES[label]), seed)


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
        "correlation": asyncio.run(_correlation(run)),
        "reward": {"before": before, "after": after},
        "train_rewards": training,
    }


async def _correlation(run: Path) -> float | None:
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
        used = {each.key: each for each in await store.training_records(list(attempts))}
    episodes = [build_episode(rollouts[each.rollout], each, calls[key], (), ()) for key, each in attempts.items()]
    pairs = [
        (used[transition.key].advantage or 0.0, worth)
        for episode in episodes
        for transition, worth in zip(episode.transitions, true_credit(episode), strict=True)
        if transition.key in used
    ]
    advantages, worths = zip(*pairs, strict=True)
    return None if len(set(advantages)) == 1 else statistics.correlation(advantages, worths)


def table(bed: Bed) -> Iterator[str]:
    """One row per rule; runs that are missing or out of date are left out of it."""
    head = ["credit", "seeds", "correlation with the oracle", "before, sampled", "after, greedy", "after, sampled"]
    head += ["while training", "CPU seconds a run"]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for label in CREDIT[bed]:
        runs = RESULTS.valid(each for each in experiments() if each.label == f"{bed}/{label}")
        shown = LAST_ONLY if label == "immediate" and bed is not Bed.ADDITIVE else label
        if not runs:
            yield f"| {shown} | 0 |" + " |" * (len(head) - 2)
            continue
        known = [each["correlation"] for each in runs if each["correlation"] is not None]
        row = [shown, str(len(runs)), mean_and_range(known) if known else "none"]
        row += [mean_and_range([each["reward"]["before"]["sampled"] for each in runs])]
        row += [mean_and_range([each["reward"]["after"][mode] for each in runs]) for mode in ("greedy", "sampled")]
        row += [mean_and_range([statistics.mean(each["train_rewards"]) for each in runs])]
        row += [f"{statistics.mean([each['cpu_seconds'] for each in runs]):.0f}"]
        yield f"| {' | '.join(row)} |"


def page() -> str:
    """docs/experiments.md: what a person wrote (experiments.head.md), then the tables."""
    parts = [PAGE.with_name("experiments.head.md").read_text().rstrip(), ""]
    for bed in CREDIT:
        spent = [
            each["cpu_seconds"] for each in RESULTS.valid(each for each in experiments() if f"/{bed}/" in each.name)
        ]
        took = f"{len(spent)} runs, {sum(spent) / 60:.0f} minutes of one core."
        parts += [f"## Credit: {bed}", "", took, "", *table(bed), ""]
    return "\n".join(parts).rstrip() + "\n"


def main() -> None:
    options = command_line(__doc__)
    if not options.write:
        chosen = [each for each in experiments() if each.name.startswith(options.only)]
        RESULTS.complete(chosen, options.minutes, learned)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
