"""How well judges order rollouts whose worth is known: asked about one at a time, and about a group at once.

    python -m tests.benchmarks.judging --write    # seconds

The judges are scripted, with errors of a known kind and size; the rules are those of a run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias
from unittest import mock

from agl_core.testing import episodes as make
from agl_core.types import Episode, Task
from agl_rewards.judge import SCALE, AskWithLabels, JudgeModel, JudgeOptions, judge
from agl_rewards.relative import RelativeJudgeOptions, relative_judge

from .tables import table, write

GROUPS, MEMBERS = 200, 8
SIZES = (1.0, 2.0, 4.0)
"""Of the error: a standard deviation, or the bonus of the first; in points of a scale from 0 to 10."""
PAGE = "rewards.md"

ScriptedError: TypeAlias = Callable[[random.Random, int], Iterator[float]]
"""What a judge adds to the worth of each of so many rollouts, in the order in which one call shows them."""


def drifting(rng: random.Random, count: int) -> Iterator[float]:
    return itertools.repeat(rng.gauss(), count)


def uncertain(rng: random.Random, count: int) -> Iterator[float]:
    return (rng.gauss() for _ in range(count))


def hasty(rng: random.Random, count: int) -> Iterator[float]:
    return (float(place == 0) for place in range(count))


JUDGES: dict[str, ScriptedError] = {
    "is stricter or milder from call to call": drifting,
    "errs on each rollout by itself": uncertain,
    "favours the first that it sees": hasty,
}


def worth(episode: Episode) -> float:
    return float(str(episode.result))


def judged_group(number: int) -> list[Episode]:
    rng, task = random.Random(f"group {number}"), Task(f"t{number}", "…")
    return [make.episode(task=task, result=f"{rng.uniform(0, SCALE):.6f}") for _ in range(MEMBERS)]


async def agreement(error: ScriptedError, size: float) -> list[float]:
    """Kendall's τ of rewards with the truth, by `judge`, by `relative_judge`, and by its ranking; means of all groups.

    τ is the mean over the pairs of a group: 1 if their order is right, -1 if it is wrong, 0 if their rewards are equal.
    """

    async def numbers(self: JudgeModel, count: int, ask: AskWithLabels) -> list[float]:
        material = json.dumps(ask([str(place) for place in range(count)]).material)
        question = ask([f"{number:x}" for number in random.Random(material).sample(range(1 << 32), count)])
        answer, rollouts = question.material.get("answer"), question.material.get("rollouts", {})
        worths = [float(said[-1][1]) for said in rollouts.values()] or [float(answer)]
        errors = error(random.Random(str(question.labels)), len(worths))
        seen = [worth + size * added for worth, added in zip(worths, errors, strict=True)]
        if question.ranked:
            found = [1.0 + sum(other > value for other in seen) for value in seen]
        else:  # Whole points of its scale, as models give.
            found = [min(max(round(value), 0), SCALE) for value in seen]
        by_label = dict(zip(rollouts or question.labels, found, strict=True))
        return [by_label[label] for label in question.labels]

    given = {"base_url": "", "model": "", "rubric": ""}
    alone = judge(JudgeOptions(**given))
    together = [relative_judge(RelativeJudgeOptions(**given, ranking=ranking)) for ranking in (False, True)]
    taus: list[list[float]] = []
    with mock.patch.object(JudgeModel, "numbers", numbers):
        for number in range(GROUPS):
            group = judged_group(number)
            rewards = [[await alone(episode) for episode in group]]
            rewards += [await rule.reward(group) for rule in together]
            taus.append([kendalls_tau(values, [worth(episode) for episode in group]) for values in rewards])
    return [statistics.mean(of_rule) for of_rule in zip(*taus, strict=True)]


def kendalls_tau(values: Sequence[float], truth: Sequence[float]) -> float:
    """
    >>> kendalls_tau([1, 2, 3], [10, 20, 30]), kendalls_tau([1, 1, 0], [10, 20, 30])
    (1.0, -0.6666666666666666)
    """
    pairs = itertools.combinations(zip(values, truth, strict=True), 2)
    return statistics.mean(
        ((a > b) - (a < b)) * ((true_a > true_b) - (true_a < true_b)) for (a, true_a), (b, true_b) in pairs
    )


async def figures() -> str:
    """The table of the page."""
    cases = [("is right", 0.0), *itertools.product(JUDGES, SIZES)]
    rows = [
        f"{name} | {size:g} | {' | '.join(f'{tau:.2f}' for tau in await agreement(JUDGES.get(name, drifting), size))}"
        for name, size in cases
    ]
    return table("the judge … | by | `judge` | `relative_judge` | with `ranking`", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    text = asyncio.run(figures())
    print(text)
    if parser.parse_args().write:
        write(PAGE, "judging.py", text)
