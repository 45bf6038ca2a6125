"""Trains the examples with every algorithm, credit rule and seed, and writes docs/comparison.md.

    python docs/make_comparison.py                  # what is missing in docs/comparison.json, then the page
    python docs/make_comparison.py --minutes 30     # start no further run after half an hour; go on later
    python docs/make_comparison.py --only trip      # runs whose name begins so
    python docs/make_comparison.py --write          # no run, the page alone

It can be interrupted at any time; see examples/measured.py.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from agl_core.reading.metrics import read_metrics, series

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from measured import (
    EXAMPLES,
    Cell,
    Experiment,
    Result,
    Results,
    average,
    held_out,
    make_page,
    seeds_run,
    spread,
    table,
    while_training,
)

RESULTS = Results(Path(__file__).with_name("comparison.json"))
PAGE = Path(__file__).with_name("comparison.md")
SEEDS = (0, 1, 2)
THRESHOLDS = (0.77, 0.90)
WINDOW = 3

ALGORITHMS = ("grpo", "ppo", "reinforce++")
CREDIT = ("identical", "discounted", "air", "stepwise", "immediate")
PAIRS = {
    f"{algorithm} × {credit}": (f"algorithm.name={algorithm}", f"credit.name={credit}")
    for algorithm in ALGORITHMS
    for credit in CREDIT
} | {
    f"{algorithm}, across calls × immediate": (
        f"algorithm.name={algorithm}",
        f'algorithm."{algorithm}".across_calls=true',
        "credit.name=immediate",
    )
    for algorithm in ("ppo", "reinforce++")
}
"""Every pair that is allowed: rewards of single calls are for algorithms that own the time axis (`across_calls`)."""

CAPPED = {
    "trip": ("eval.tasks=40",),
    "calc": ("engine.torch.threads=1", "train.steps=20", "train.groups_per_step=8", "eval.every=20", "eval.tasks=40"),
}
"""How runs of an example are kept short."""

AIR = "rewards.tool_results.weight=1"
KL = "algorithm.grpo.beta=0.04"
ABLATION: dict[str, tuple[str, ...]] = {
    "grpo × identical": (),
    "grpo × discounted": ("credit.name=discounted",),
    "grpo × stepwise": ("credit.name=stepwise",),
    "grpo × air": ("credit.name=air",),
    "grpo × identical, tool results as rewards": (AIR,),
    "grpo × discounted, tool results as rewards": ("credit.name=discounted", AIR),
    "grpo × identical, KL with β = 0.04": (KL,),
    "grpo × stepwise, KL with β = 0.04": ("credit.name=stepwise", KL),
}
"""What is changed in the trip example, one thing or two at a time; those that are pairs too are run once."""


def experiments() -> Iterator[Experiment]:
    """All of them, seed by seed, so that an interrupted table has all its rows first."""
    for example in CAPPED:
        for seed in SEEDS:
            for label, changes in PAIRS.items():
                yield Experiment(EXAMPLES / example, label, (*CAPPED[example], *changes), seed, memory_first)
            if example == "trip":
                for label, changes in ABLATION.items():
                    if label not in PAIRS:
                        changed = (*CAPPED[example], *changes)
                        yield Experiment(EXAMPLES / example, label, changed, seed, memory_first)


def memory_first(run: Path) -> Result:
    """How often the trip example's policy asked memory first in the end."""
    asked = series(read_metrics(run), "eval", "eval/sampled/reward/memory_first")
    return {"memory_first": asked[-1][1]} if asked else {}


def steps_to(rewards: Sequence[float], threshold: float) -> int | None:
    """The first step whose training reward, the mean of it and the `WINDOW` - 1 before it, reaches the threshold.

    >>> steps_to([0.5, 0.8, 0.8, 0.8], 0.77), steps_to([0.5, 0.5, 0.5], 0.77)
    (4, None)
    """
    for end in range(WINDOW, len(rewards) + 1):
        if statistics.mean(rewards[end - WINDOW : end]) >= threshold:
            return end
    return None


def median_steps(threshold: float) -> Cell:
    def cell(runs: Sequence[Result]) -> str:
        found = [steps_to(each["train_rewards"], threshold) for each in runs]
        reached = [step for step in found if step is not None]
        if len(reached) < len(found):
            return f"{len(reached)} of {len(found)} runs" if reached else "never"
        return f"{statistics.median(reached):g}"

    return cell


def section(title: str, example: str, labels: Sequence[str]) -> Iterator[str]:
    """A table with one row per label; runs that are missing or out of date are left out of it."""
    columns: dict[str, Cell] = {
        "seeds": seeds_run,
        "before": spread(held_out("before", "sampled")),
        "after, greedy": spread(held_out("after", "greedy")),
        "after, sampled": spread(held_out("after", "sampled")),
    }
    if example == "trip":
        columns["memory first"] = spread(lambda run: run["memory_first"])
    columns["while training"] = spread(while_training)
    columns |= {f"steps to {threshold:.2f}": median_steps(threshold) for threshold in THRESHOLDS}
    columns["CPU seconds"] = average(lambda run: run["cpu_seconds"])
    rows = {
        label: RESULTS.valid(e for e in experiments() if e.name.startswith(f"{example}/{label}/")) for label in labels
    }
    yield from (f"## {title}", "", *table("run", rows, columns), "")


def tables() -> Iterator[str]:
    """All of the page that is measured."""
    yield from section("trip: every algorithm with every credit rule", "trip", list(PAIRS))
    yield from section("trip: what helps, with GRPO", "trip", list(ABLATION))
    yield from section("calc: every algorithm with every credit rule", "calc", list(PAIRS))


def main() -> None:
    make_page(__doc__, PAGE, RESULTS, experiments(), tables)


if __name__ == "__main__":
    main()
