"""Makes the runs that docs/comparison.md is about, and writes the page.

    python docs/make_comparison.py               # what is missing in docs/comparison.json, then the page
    python docs/make_comparison.py --only trip   # runs whose name begins so
    python docs/make_comparison.py --minutes 30  # start no further run after half an hour; go on later
    python docs/make_comparison.py --write       # no run, the page alone

It can be interrupted at any time; see examples/measured.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from make_readme import replaced

from agl_core.reading.metrics import read_metrics, series

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from measured import EXAMPLES, Cell, Experiment, Result, Results, average, spread, table

COMPARED = Results(Path(__file__).with_name("comparison.json"))


def held_out(when: str, mode: str) -> Callable[[Result], float]:
    """The mean reward on the first held-out set, `before` or `after` training."""

    def value(run: Result) -> float:
        reward: float = next(iter(run["rewards"].values()))[when][mode]
        return reward

    return value


def seeds_run(runs: Sequence[Result]) -> str:
    return str(len(runs))


LEARNING: dict[str, Cell] = {
    "seeds": seeds_run,
    "before, sampled": spread(held_out("before", "sampled")),
    "after, greedy": spread(held_out("after", "greedy")),
    "after, sampled": spread(held_out("after", "sampled")),
    "while training": spread(lambda run: statistics.mean(run["train_rewards"])),
    "CPU seconds a run": average(lambda run: run["cpu_seconds"]),
}

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
"""Changes to the trip example, one thing or two at a time; those that are pairs too are run once."""
THRESHOLDS = (0.77, 0.90)
WINDOW = 3


def compared() -> Iterator[Experiment]:
    """Seed by seed, so that an interrupted table has all its rows first."""
    for example, capped in CAPPED.items():
        for seed in range(3):
            for label, changes in {**(ABLATION if example == "trip" else {}), **PAIRS}.items():
                yield Experiment(EXAMPLES / example, label, (*capped, *changes), seed, memory_first)


def memory_first(run: Path) -> Result:
    """How often the trip example's policy asked memory first in the end."""
    shares = series(read_metrics(run), "eval", "eval/sampled/reward/memory_first")
    return {"memory_first": shares[-1][1]} if shares else {}


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
    """The steps that it takes to reach the threshold."""

    def cell(runs: Sequence[Result]) -> str:
        steps = [steps_to(run["train_rewards"], threshold) for run in runs]
        reached = [step for step in steps if step is not None]
        if len(reached) < len(runs):
            return f"{len(reached)} of {len(runs)} runs" if reached else "never"
        return f"{statistics.median(reached):g}"

    return cell


def comparison() -> Iterator[str]:
    """All of docs/comparison.md that is measured."""
    memory = {"memory first": spread(lambda run: run["memory_first"])}
    steps = {f"steps to {threshold:.2f}": median_steps(threshold) for threshold in THRESHOLDS}
    for title, example, labels in (
        ("trip: every algorithm with every credit rule", "trip", PAIRS),
        ("trip: what helps, with GRPO", "trip", ABLATION),
        ("calc: every algorithm with every credit rule", "calc", PAIRS),
    ):
        rows = {
            label: COMPARED.valid(run for run in compared() if run.name.startswith(f"{example}/{label}/"))
            for label in labels
        }
        columns = {**LEARNING, **(memory if example == "trip" else {}), **steps}
        yield from (f"## {title}", "", *table("run", rows, columns), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no further run after so long")
    parser.add_argument("--only", default="", help="runs whose name begins so, for instance 'trip/ppo'")
    parser.add_argument("--write", action="store_true", help="write the page from the results there are")
    options = parser.parse_args()
    if not options.write:
        COMPARED.complete([run for run in compared() if run.name.startswith(options.only)], options.minutes)
    page, tables = COMPARED.file.with_suffix(".md"), "\n".join(comparison()).rstrip()
    page.write_text(replaced(page.read_text(), "docs/make_comparison.py", f"\n{tables}\n"))


if __name__ == "__main__":
    main()
