"""The statistics of the page on credit, by figures that were worked out by hand."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from .conftest import ROOT


@pytest.fixture(scope="module")
def maker() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield importlib.import_module("make_credit")


def test_holm_multiplies_by_the_tests_that_are_left_and_never_falls(maker: Any) -> None:
    assert maker.holm([0.01, 0.02, 0.03, 0.04, 0.05]) == pytest.approx([0.05, 0.08, 0.09, 0.09, 0.09])
    assert maker.holm([0.04, 0.001, 0.03]) == pytest.approx([0.06, 0.003, 0.06]), "in the order of the hypotheses"
    assert maker.holm([0.6, 0.5]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("differences", "bound", "p"),
    [
        ([1, 2, 3], 0, 1 / 8),  # No other signs of 1, 2 and 3 have so high a sum.
        ([1.5, 2.5, 3.5], 0.5, 1 / 8),
        ([1, -1, 2], 0, 3 / 8),  # Sums of ±1 ±1 ±2: 4, twice 2, twice 0, twice −2, −4.
        ([0.1] * 12, 0.1, 1.0),
        ([0.2] * 12, 0.1, 1 / 4096),
    ],
)
def test_a_p_counts_the_sign_changes_with_as_high_a_mean(
    maker: Any, differences: list[float], bound: float, p: float
) -> None:
    assert maker.above(np.array(differences), bound) == pytest.approx(p)


def test_intervals_hold_the_truth_about_as_often_as_they_say(maker: Any) -> None:
    """A bootstrap of 12 values is a little too narrow: 95% come to some 91%."""
    rng, held = np.random.default_rng(7), 0
    for _ in range(100):
        mean, low, high = map(float, re.findall(r"[+-][\d.]+", maker.interval(rng.normal(0.3, 0.2, 12))))
        assert low < mean < high
        held += low <= 0.3 <= high
    assert 84 <= held <= 98
    assert maker.outside(np.full(12, 0.05), 0.06) == 0
    assert maker.outside(np.array([0.0, 0.12] * 6), 0.06) == pytest.approx(0.5, abs=0.2), "it may lie on either side"
    assert maker.outside(np.full(12, -0.07), 0.06) == 1


@pytest.mark.parametrize(
    ("rewards", "rollouts"), [([0, 0.4, 0.6, 0.6], 3 * 48), ([0.5, 0.5], 2 * 48), ([0, 0.9, 0, 0.9], float("inf"))]
)
def test_rollouts_to_half_are_counted_by_the_mean_of_two_steps(
    maker: Any, rewards: list[float], rollouts: float
) -> None:
    assert maker.rollouts_to_half({"rewards": rewards}) == rollouts


def test_the_alarm_is_looked_for_in_the_steps_so_far(maker: Any) -> None:
    result = {"rewards": [0.0] * 6, "tools_ok": [0.4, 0.4, 0.6, 0.6, 0.7, 0.7]}
    assert [maker.fired(result, by_step) for by_step in (4, 5)] == [False, True]
    assert not maker.fired({**result, "rewards": [0.0, 0.0, 0.1, 0.1, 0.1, 0.1]}, 6)


def test_rates_are_chosen_on_other_seeds_before_rules_are_compared(maker: Any) -> None:
    def better(cell: str, arm: str) -> float:
        return float(maker.rates_of(cell)[arm != "gigpo"])

    results = {e.name: {"rewards": [float(e.rate == better(e.cell, e.arm))]} for e in maker.tuning()}
    experiments = [*maker.compared(results)]
    assert all(e.rate == better(e.cell, e.arm) for e in experiments)
    assert len(experiments) == maker.SEEDS * (len(maker.CELLS) * len(maker.ARMS) - 1)
    assert not any((e.cell, e.arm) == (maker.TEXTWORLD, maker.ORACLE) for e in experiments), "its worth is not known"
    assert not {e.seed for e in experiments} & {e.seed for e in maker.tuning()}
    cell = experiments[0].cell
    results |= {
        e.name: {"rewards": [e.seed + 2.0 * (e.arm == "air")]} for e in experiments if (e.seed, e.arm) != (3, "air")
    }
    assert maker.paired(results, cell, "air").tolist() == [2.0] * (maker.SEEDS - 1), "seeds that both have"
    del results[next(maker.tuning()).name]
    assert maker.chosen_rates(results, cell) == {}
    assert {e.cell for e in maker.compared(results)} == {maker.TEXTWORLD}, "which has step sizes of its own"
