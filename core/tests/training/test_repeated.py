"""pass@k, pass^k and comparisons: against enumeration and the formulas that define them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from agl_core.reading.evaluations import compare, pass_all, pass_at, passes, sign_test, wilson
from agl_core.training.evaluation import TaskScore


@pytest.mark.parametrize(("tries", "k"), [(5, 1), (5, 3), (6, 6)])
def test_the_estimates_are_the_means_over_all_choices_of_k_tries(tries: int, k: int) -> None:
    for solved in range(tries + 1):
        outcomes = [True] * solved + [False] * (tries - solved)
        chosen = list(itertools.combinations(outcomes, k))
        assert pass_at(k, tries, solved) == pytest.approx(sum(map(any, chosen)) / len(chosen))
        assert pass_all(k, tries, solved) == pytest.approx(sum(map(all, chosen)) / len(chosen))


@pytest.mark.parametrize(("share", "count"), [(0.0, 5), (0.2, 10), (0.5, 40), (1.0, 200)])
def test_the_interval_ends_where_the_score_test_does(share: float, count: int) -> None:
    low, high = wilson(share, count)
    for end in {low, high} - {0.0, 1.0}:
        assert abs(share - end) == pytest.approx(1.959963984540054 * math.sqrt(end * (1 - end) / count))
    assert 0 <= low <= share <= high <= 1
    assert high - low > 0, "also where all tasks went one way"


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (3, 9), (12, 2)])
def test_the_sign_test_counts_the_outcomes_as_extreme(gained: int, lost: int) -> None:
    both, extreme = gained + lost, min(gained, lost)
    outcomes = [sum(signs) for signs in itertools.product((0, 1), repeat=both)]
    as_extreme = sum(min(ups, both - ups) <= extreme for ups in outcomes)

    assert sign_test(gained, lost) == pytest.approx(as_extreme / len(outcomes))


def scores(mode: str, *tasks: tuple[str, Sequence[float]]) -> list[TaskScore]:
    return [TaskScore("eval", mode, task, tuple(rewards)) for task, rewards in tasks]


def test_passes_are_of_repeated_tasks_alone() -> None:
    comparison = passes(
        scores("sampled", ("a", [1, 1, 0.5, 0]), ("b", [0, 0, 0, 1])) + scores("greedy", ("a", [1.0])), success=1.0
    )

    assert [(estimate.mode, estimate.k, estimate.tasks, estimate.repeats) for estimate in comparison] == [
        ("sampled", k, 2, 4) for k in (1, 2, 4)
    ]
    assert [estimate.pass_at.value for estimate in comparison] == pytest.approx([3 / 8, (5 / 6 + 1 / 2) / 2, 1])
    assert [estimate.pass_all.value for estimate in comparison] == pytest.approx([3 / 8, (1 / 6) / 2, 0])
    half = passes(scores("sampled", ("a", [1, 1, 0.5, 0])), success=0.5)
    assert half[0].pass_at.value == 0.75


def test_two_policies_are_compared_on_the_tasks_that_both_have() -> None:
    before = scores("greedy", *((name, [float(name in "ab")]) for name in "abcdef"))
    now = scores("greedy", *((name, [float(name in "bcde")]) for name in "abcdeg"))
    (comparison,) = compare(now, before, success=1.0)

    assert comparison.tasks == 5
    assert [outcome.task for outcome in comparison.gained] == ["c", "d", "e"]
    assert [(outcome.task, outcome.before, outcome.now) for outcome in comparison.lost] == [("a", 1.0, 0.0)]
    assert comparison.difference.value == pytest.approx(0.4)
    assert comparison.difference.low <= 0.4 <= comparison.difference.high
    assert comparison.p == sign_test(3, 1)
    assert compare(now, scores("sampled", ("a", [1.0])), success=1.0) == []
    (same,) = compare(now, now, success=1.0)
    assert (same.difference.low, same.difference.high, same.gained, same.lost, same.p) == (0, 0, [], [], 1)
