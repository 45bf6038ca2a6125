"""Makes the runs that docs/experiments.md is about, and writes its tables.

    python docs/make_measured.py comparison                # what is missing in docs/comparison.json, then the page
    python docs/make_measured.py comparison --only trip    # runs whose name begins so
    python docs/make_measured.py experiments --minutes 30  # start no further run after half an hour; go on later
    python docs/make_measured.py experiments --write       # no run, the page alone

It can be interrupted at any time; see examples/measured.py. make_credit.py measures credit between calls.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from make_readme import replaced

from agl_server.health.verdict import read_metrics, series

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from measured import EXAMPLES, Cell, Experiment, Result, Results, average, spread, table

COMPARED, MEASURED = (Results(Path(__file__).with_name(name)) for name in ("comparison.json", "experiments.json"))


def held_out(when: str, mode: str) -> Callable[[Result], float]:
    """The mean reward on the first held-out set, `before` or `after` training."""

    def value(run: Result) -> float:
        reward: float = next(iter(run["rewards"].values()))[when][mode]
        return reward

    return value


LEARNING: dict[str, Cell] = {
    "after, sampled": spread(held_out("after", "sampled")),
    "while training": spread(lambda run: statistics.mean(run["train_rewards"])),
}


# Every algorithm with every credit rule.

ALGORITHMS = ("grpo", "ppo", "reinforce++")
CREDIT: Mapping[str, tuple[str, ...]] = {
    "identical": ("credit.name=identical",),
    "discounted": ("credit.name=discounted",),
    "air, mixed": ("credit.name=air", "credit.air.form=mixed"),
    "immediate": ("credit.name=immediate",),
}
PAIRS = {
    f"{algorithm} × {label}": (f"algorithm.name={algorithm}", *credit)
    for algorithm in ALGORITHMS
    for label, credit in CREDIT.items()
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

ABLATION = {"grpo × identical, KL with β = 0.04": ("algorithm.grpo.beta=0.04",)}
"""A change to the trip example."""


def compared() -> Iterator[Experiment]:
    """Seed by seed, so that an interrupted table has all its rows first."""
    for example, capped in CAPPED.items():
        for seed in range(3):
            for label, changes in {**(ABLATION if example == "trip" else {}), **PAIRS}.items():
                yield Experiment(EXAMPLES / example, label, (*capped, *changes), seed)


def comparison() -> Iterator[str]:
    """Every pair on both examples; the change to trip is in the JSON alone."""
    yield f"| pair | {' | '.join(f'{example}: {column}' for example in CAPPED for column in LEARNING)} |"
    yield "|---" * (len(CAPPED) * len(LEARNING) + 1) + "|"
    for pair in PAIRS:
        runs = [runs_of(COMPARED, compared, f"{example}/{pair}") for example in CAPPED]
        yield f"| {pair} | {' | '.join(cell(of_pair) for of_pair in runs for cell in LEARNING.values())} |"


# What each contribution is worth.

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
CONCATENATED = ('plugins=["sql_tasks.py", "../../docs/concatenated.py"]', "alarms.logprob_gap=false")
"""Without the second, training stops: the probabilities of tokens are not those with which they were sampled."""

REFILL = {
    "no": ("train.refill=0",),
    "yes": ("train.refill=8",),
    "no, 12 groups a step": ("train.refill=0", "train.groups_per_step=12"),
}
"""Whether groups without contrast are replaced, at most as many as a step has, and what costs as much without."""
REFILLED = {
    "calc": ("train.steps=20", "train.groups_per_step=8", "eval.every=20", "eval.tasks=60", "engine.torch.threads=1"),
    "sql": ("train.steps=15", "eval.every=15", "eval.tasks=60", "engine.torch.threads=1"),
}

REFILL_COSTS: dict[str, Cell] = {
    "rollouts": average(lambda run: sum(run["step_rollouts"])),
    **LEARNING,
    "gained per 1,000 rollouts": spread(lambda run: 1000 * gain(run) / sum(run["step_rollouts"])),
}

TEACHER = EXAMPLES.parent / "runs" / "calc-teacher"
"""Where the weights of the teacher are kept. It is made again with its result, so delete that if they are gone."""
SAMPLED_ALONE = ("eval.tasks=40", 'eval.modes=["eval-sampled"]')
EIGHT_ROLLOUTS = ("train.steps=40", *SAMPLED_ALONE, "eval.every=40", "engine.torch.threads=1")
"""In each step, by the rows that have it below."""
DISTILLED = {
    "grpo, 4 groups of 8 a step": (
        *("train.groups_per_step=4", "train.steps=24", "eval.every=24", *SAMPLED_ALONE),
        *("engine.torch.threads=1", "algorithm.name=grpo"),
    ),
    "grpo, a group of 8 a step": ("train.groups_per_step=1", *EIGHT_ROLLOUTS),
    "distill, 8 tasks a step": (
        *("train.groups_per_step=8", "train.group_size=1", *EIGHT_ROLLOUTS),
        *("algorithm.name=distill", "algorithm.distill.epochs=2"),
        f"algorithm.distill.teacher={os.path.relpath(TEACHER, EXAMPLES / 'calc')}",
    ),
}
"""A student with a reward, and one with a teacher; both take two passes over each batch."""


def measured() -> Iterator[Experiment]:
    """Seed by seed, and row by row of all tables."""
    teaching = ("engine.torch.threads=1", "eval.every=10", "eval.tasks=100")
    yield Experiment(EXAMPLES / "calc", "distillation/teacher", teaching, 100, keep_teacher)
    for seed in range(3):
        for label, changes in DISTILLED.items():
            yield Experiment(EXAMPLES / "calc", f"distillation/{label}", changes, seed, steps_of)
    for seed in range(5):
        for example, shorter in REFILLED.items():
            for label, changes in REFILL.items():
                yield Experiment(EXAMPLES / example, f"refill/{label}", (*shorter, *changes), seed, steps_of)
    for seed in range(5):
        for label, agents in TRAINED.items():
            yield Experiment(EXAMPLES / "sql", label, (*SHORTER, f"train.agents={list(agents)}"), seed)
        everyone = f"train.agents={list(TRAINED[ALL_THREE])}"
        yield Experiment(EXAMPLES / "sql", ONE_SEQUENCE, (*SHORTER, everyone, *CONCATENATED), seed)


def keep_teacher(run: Path) -> Result:
    shutil.copytree(run / "model", TEACHER, dirs_exist_ok=True)
    return {}


def steps_of(run: Path) -> Result:
    """The cost of each training step: its rollouts, and its seconds on the wall."""
    metrics = read_metrics(run)
    return {
        name: [value for _, value in series(metrics, "train", key)]
        for name, key in (("step_rollouts", "rollouts"), ("step_seconds", "seconds/step"))
    }


def gain(run: Result) -> float:
    return held_out("after", "sampled")(run) - held_out("before", "sampled")(run)


def experiments() -> Iterator[str]:
    """All other tables."""
    rows = {label: runs_of(MEASURED, measured, f"sql/{label}") for label in (*TRAINED, ONE_SEQUENCE)}
    yield from (*table("sql, trained", rows, LEARNING), "")
    refilled = {
        f"{example}, {label}": runs_of(MEASURED, measured, f"{example}/refill/{label}")
        for example in REFILLED
        for label in REFILL
    }
    yield from (*table("groups without contrast replaced", refilled, REFILL_COSTS), "")
    yield from distillation()


def distillation() -> Iterator[str]:
    """How many rollouts it takes a student to come near its teacher, with a reward and with the teacher."""
    teachers = runs_of(MEASURED, measured, "calc/distillation/teacher")
    score = held_out("after", "sampled")(teachers[0]) if teachers else 1.0
    columns: dict[str, Cell] = {
        "rollouts": average(lambda run: sum(run["step_rollouts"])),
        "of them to 90% of the teacher's score, by seed": rollouts_to(0.9 * score),
        "after, sampled": LEARNING["after, sampled"],
    }
    rows = {"grpo, 8 groups of 8 a step": runs_of(MEASURED, measured, "calc/refill/no")}
    rows |= {label: runs_of(MEASURED, measured, f"calc/distillation/{label}") for label in DISTILLED}
    yield from table(f"calc, with a teacher that has {score:.2f}", rows, columns)


AVERAGED = 96
"""So many rollouts make a mean of the rewards while training."""


def averages(run: Result) -> dict[int, float]:
    """By the rollouts so far, after each step, the mean reward of the last `AVERAGED` of them."""
    size, rewards = int(run["step_rollouts"][0]), run["train_rewards"]
    steps = AVERAGED // size
    return {size * end: statistics.mean(rewards[end - steps : end]) for end in range(steps, len(rewards) + 1)}


def rollouts_to(least: float) -> Cell:
    """The rollouts of each seed until the mean of the last `AVERAGED` reaches this."""

    def cell(runs: Sequence[Result]) -> str:
        reached = [next((end for end, mean in averages(run).items() if mean >= least), None) for run in runs]
        return ", ".join("never" if end is None else str(end) for end in reached)

    return cell


# The page.


def runs_of(results: Results, runs: Callable[[], Iterator[Experiment]], name: str) -> list[Result]:
    """The valid results of all seeds of what is named by example and label."""
    return results.valid(run for run in runs() if run.name.startswith(f"{name}/"))


@dataclass(frozen=True)
class Part:
    """A part of the page: its results, the runs that it is about, and its tables."""

    results: Results
    runs: Callable[[], Iterator[Experiment]]
    tables: Callable[[], Iterator[str]]

    def write(self, name: str) -> None:
        """Write the tables anew."""
        page = Path(__file__).with_name("experiments.md")
        section, tables = f"docs/make_measured.py, {name}", "\n".join(self.tables()).rstrip()
        page.write_text(replaced(page.read_text(), section, f"\n{tables}\n"))


PARTS: Mapping[str, Part] = {
    "comparison": Part(COMPARED, compared, comparison),
    "experiments": Part(MEASURED, measured, experiments),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no further run after so long")
    parser.add_argument("--only", default="", help="runs whose name begins so, for instance 'trip/ppo'")
    parser.add_argument("--write", action="store_true", help="write the page from the results there are")
    options = parser.parse_args()
    part = PARTS[options.part]
    if not options.write:
        part.results.complete([run for run in part.runs() if run.name.startswith(options.only)], options.minutes)
    part.write(options.part)


if __name__ == "__main__":
    main()
