"""Measures what each contribution is worth, and writes docs/experiments.md.

    python docs/make_experiments.py                 # what is missing in docs/experiments.json, then the page
    python docs/make_experiments.py --minutes 30    # start no further run after half an hour; go on later
    python docs/make_experiments.py --only beds/decisive
    python docs/make_experiments.py --write         # no run, the page alone

It can be interrupted at any time; see examples/measured.py. The beds are described in examples/beds/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from operator import itemgetter
from pathlib import Path

from credit_truth import RULES, learned

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from beds import Bed
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

RESULTS = Results(Path(__file__).with_name("experiments.json"))
PAGE = Path(__file__).with_name("experiments.md")
SEEDS = range(5)

CREDIT: dict[Bed, Sequence[str]] = {
    Bed.ADDITIVE: ("identical", "immediate", "stepwise", "reward-to-go"),
    Bed.DECISIVE: ("identical", "stepwise", "discounted, γ = 0.9", "immediate"),
    Bed.RECOVERABLE: ("identical", "air, α = 0.2", "stepwise", "discounted, γ = 0.9", "immediate"),
}
"""The rules that differ on each bed: where only the end earns, reward-to-go is identical; without tools, air is.

After `identical` comes what theory prefers, so that an interrupted run has compared the two.
"""
LAST_ONLY = "last call only"
"""What `immediate` is where no call earns anything by itself."""

ALL_THREE = "all three"
TRAINED = {
    "writer and rewriter": ("writer", "rewriter"),
    "writer": ("writer",),
    "rewriter": ("rewriter",),
    ALL_THREE: ("writer", "rewriter", "checker"),
}
"""Which agents of examples/sql learn."""
SHORTER = ("train.steps=20", "eval.every=20", "eval.tasks=100", "engine.torch.threads=1")
"""Half of the example's steps."""

ONE_SEQUENCE = "all three, one sequence"
CONCATENATED = ('plugins=["sql_tasks.py", "../../docs/concatenated.py"]', "train.serving_gap=1")
"""Without the second, training stops: the probabilities of tokens are not those with which they were sampled."""

LEARNING: dict[str, Cell] = {
    "seeds": seeds_run,
    "before, sampled": spread(held_out("before", "sampled")),
    "after, greedy": spread(held_out("after", "greedy")),
    "after, sampled": spread(held_out("after", "sampled")),
    "while training": spread(while_training),
    "CPU seconds a run": average(lambda run: run["cpu_seconds"]),
}
EFFICIENCY: dict[str, Cell] = {
    "seeds": seeds_run,
    "calls a rollout": spread(lambda run: training_calls(run) / sum(run["rollouts"].values()), 2),
    "trained on": spread(lambda run: run["transitions"]["kept"] / sum(run["rollouts"].values()), 2),
    "reward gained, sampled": spread(lambda run: gain(run)),
    "gained per 1,000 calls of training": spread(lambda run: 1000 * gain(run) / training_calls(run)),
}


def experiments() -> Iterator[Experiment]:
    """Seed by seed, and row by row of all tables."""
    for seed in SEEDS:
        for label, agents in TRAINED.items():
            trained = f"train.agents={list(agents)}"
            yield Experiment(EXAMPLES / "sql", label, (*SHORTER, trained), seed)
        everyone = f"train.agents={list(TRAINED[ALL_THREE])}"
        yield Experiment(EXAMPLES / "sql", ONE_SEQUENCE, (*SHORTER, everyone, *CONCATENATED), seed)
        for row in zip_longest(*CREDIT.values()):
            for bed, label in zip(CREDIT, row, strict=True):
                if label is not None:
                    bedded = (f"tasks.train.bed={bed}", f"tasks.eval.bed={bed}")
                    yield Experiment(EXAMPLES / "beds", f"{bed}/{label}", (*bedded, *RULES[label][0]), seed, learned)


def runs_of(name: str) -> list[Result]:
    """Those there are, of all seeds; they are named by example and label."""
    return RESULTS.valid(each for each in experiments() if each.name.startswith(f"{name}/"))


def gain(run: Result) -> float:
    return held_out("after", "sampled")(run) - held_out("before", "sampled")(run)


def training_calls(run: Result) -> int:
    calls: int = run["transitions"]["kept"] + sum(run["transitions"]["dropped"].values())
    return calls


def agreement() -> Iterator[str]:
    """One row per rule, one column per bed: all runs of a bed begin with the same policy, so each is a measurement."""
    beds = {bed: [each["correlations"] for each in runs_of(f"beds/{bed}") if each["correlations"]] for bed in CREDIT}
    yield f"| credit | {' | '.join(f'{bed} ({len(found)} first steps)' for bed, found in beds.items())} |"
    yield "|---" * (len(beds) + 1) + "|"
    for label in RULES:
        known = ([each for each in found if label in each] for found in beds.values())
        cells = (spread(itemgetter(label))(each) if each else "" for each in known)
        yield f"| {label} | {' | '.join(cells)} |"


def took(runs: Sequence[Result]) -> str:
    return f"{len(runs)} runs, {sum(each['cpu_seconds'] for each in runs) / 60:.0f} minutes of one core."


def tables() -> Iterator[str]:
    """All of the page that is measured."""
    rows = {label: runs_of(f"sql/{label}") for label in (ALL_THREE, ONE_SEQUENCE)}
    yield from ("## Transitions: what the policy of sql learns", "", *table("trained", rows, LEARNING), "")
    yield from ("## Credit: how well it agrees with the truth", "", *agreement(), "")
    for bed, labels in CREDIT.items():
        rows = {shown(bed, label): runs_of(f"beds/{bed}/{label}") for label in labels}
        yield from (f"## Credit: what the policy learns, {bed}", "", took(runs_of(f"beds/{bed}")), "")
        yield from (*table("credit", rows, LEARNING), "")
    selective = {label: runs_of(f"sql/{label}") for label in TRAINED}
    yield from ("## Selective training: which agents of sql learn", "", took(list(chain(*selective.values()))), "")
    yield from (*table("trained", selective, LEARNING), "")
    yield from (
        "## Data efficiency: transitions and reward of sql",
        "",
        *table("run", selective, EFFICIENCY),
    )


def shown(bed: Bed, rule: str) -> str:
    return LAST_ONLY if rule == "immediate" and bed is not Bed.ADDITIVE else rule


def main() -> None:
    make_page(__doc__, PAGE, RESULTS, experiments(), tables)


if __name__ == "__main__":
    main()
