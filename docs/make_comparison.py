"""Trains the examples with every algorithm, credit rule and seed, and writes docs/comparison.md.

    python docs/make_comparison.py                  # what is missing in docs/comparison.json, then the page
    python docs/make_comparison.py --minutes 30     # start no further run after half an hour; go on later
    python docs/make_comparison.py --only trip      # runs whose name begins so
    python docs/make_comparison.py --write          # no run, the page alone

It can be interrupted at any time; see runs.py.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from runs import Experiment, Result, Results, command_line, mean_and_range

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
                yield Experiment(example, label, (*CAPPED[example], *changes), seed)
            if example == "trip":
                for label, changes in ABLATION.items():
                    if label not in PAIRS:
                        yield Experiment(example, label, (*CAPPED[example], *changes), seed)


def memory_first(run: Path) -> Result:
    """How often the trip example's policy asked memory first in the end."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    name = "eval/sampled/reward/memory_first"
    return {"memory_first": last[name]} if name in last else {}


def steps_to(rewards: Sequence[float], threshold: float) -> int | None:
    """The first step whose training reward, the mean of it and the `WINDOW` - 1 before it, reaches the threshold.

    >>> steps_to([0.5, 0.8, 0.8, 0.8], 0.77), steps_to([0.5, 0.5, 0.5], 0.77)
    (4, None)
    """
    for end in range(WINDOW, len(rewards) + 1):
        if statistics.mean(rewards[end - WINDOW : end]) >= threshold:
            return end
    return None


def median_steps(runs: Sequence[Result], threshold: float) -> str:
    found = [steps_to(each["train_rewards"], threshold) for each in runs]
    reached = [step for step in found if step is not None]
    if len(reached) < len(found):
        return f"{len(reached)} of {len(found)} runs" if reached else "never"
    return f"{statistics.median(reached):g}"


def table(example: str, labels: Sequence[str]) -> Iterator[str]:
    """One row per label; runs that are missing or out of date are left out of it."""
    memory = example == "trip"
    head = ["run", "seeds", "before", "after, greedy", "after, sampled"]
    head += ["memory first"] if memory else []
    head += ["while training", *(f"steps to {threshold:.2f}" for threshold in THRESHOLDS), "CPU seconds"]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for label in labels:
        runs = RESULTS.valid(each for each in experiments() if (each.example, each.label) == (example, label))
        if not runs:
            yield f"| {label} | 0 |" + " |" * (len(head) - 2)
            continue
        row = [label, str(len(runs)), mean_and_range([each["reward"]["before"]["sampled"] for each in runs])]
        row += [mean_and_range([each["reward"]["after"][mode] for each in runs]) for mode in ("greedy", "sampled")]
        row += [mean_and_range([each["memory_first"] for each in runs])] if memory else []
        row += [mean_and_range([statistics.mean(each["train_rewards"]) for each in runs])]
        row += [median_steps(runs, threshold) for threshold in THRESHOLDS]
        row += [f"{statistics.mean([each['cpu_seconds'] for each in runs]):.0f}"]
        yield f"| {' | '.join(row)} |"


def page() -> str:
    """docs/comparison.md: what a person wrote (comparison.head.md), then the tables."""
    parts = [PAGE.with_name("comparison.head.md").read_text().rstrip(), ""]
    parts += ["## trip: every algorithm with every credit rule", "", *table("trip", list(PAIRS)), ""]
    parts += ["## trip: what helps, with GRPO", "", *table("trip", list(ABLATION)), ""]
    parts += ["## calc: every algorithm with every credit rule", "", *table("calc", list(PAIRS)), ""]
    return "\n".join(parts).rstrip() + "\n"


def main() -> None:
    options = command_line(__doc__)
    if not options.write:
        chosen = [each for each in experiments() if each.name.startswith(options.only)]
        RESULTS.complete(chosen, options.minutes, memory_first)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
