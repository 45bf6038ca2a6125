"""The gate: what an evaluation has to show before a version answers anybody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from agl_core.training.evaluation import Evaluated, TaskScore
from agl_online.config import GateSection
from agl_online.trials import decide_at_gate
from agl_online.versions import By, Decision, State

SAME = np.random.default_rng(0).random(100) < 0.6
NEAR = {"eval/sampled/kl": 0.02}


def evaluated(rewards: Any, mode: str = "greedy", **shares: float) -> Evaluated:
    scores = [TaskScore("eval", mode, f"task-{number}", (float(each),)) for number, each in enumerate(rewards)]
    metrics = {"reward/mean": float(np.mean(rewards)), "length/response": 20.0, **shares}
    return Evaluated(metrics={f"eval/{mode}/{key}": value for key, value in metrics.items()}, scores=scores)


def decision(
    candidate: Evaluated,
    incumbent: Evaluated,
    divergence: Mapping[str, float] = NEAR,
    **limits: float,
) -> Decision:
    settings = GateSection(**limits)
    found = decide_at_gate(20, candidate, incumbent, settings, divergence=divergence)
    assert (found.step, found.by) == (20, By.GATE)
    return found


def test_the_reward_may_not_be_lower_with_confidence() -> None:
    better = np.maximum(SAME, np.arange(100) < 30)
    passed = decision(evaluated(better), evaluated(SAME))
    assert passed.state is State.PASSED
    assert passed.reason == f"Reward {SAME.mean():.3f} → {better.mean():.3f} on eval, greedy."
    figures = passed.figures
    assert (
        figures["eval/greedy/reward/low"]
        < figures["eval/greedy/reward/difference"]
        < figures["eval/greedy/reward/high"]
    )
    assert figures["eval/greedy/reward/mean"] == pytest.approx(better.mean())
    assert decision(evaluated(SAME), evaluated(SAME)).state is State.PASSED

    worse = evaluated(np.minimum(SAME, np.arange(100) >= 12))
    assert decision(worse, evaluated(SAME)).state is State.REJECTED
    assert (
        "the reward on eval, greedy may be lower by more than 0.05" in decision(worse, evaluated(SAME)).reason.lower()
    )
    assert decision(worse, evaluated(SAME), tolerance=0.2).state is State.PASSED
    noisy = evaluated(np.random.default_rng(1).random(100) < SAME.mean() + 0.01)
    assert decision(noisy, evaluated(SAME)).state is State.REJECTED, "the mean is no lower, but nothing shows it"


def test_few_tasks_and_other_tasks_show_nothing() -> None:
    few = decision(evaluated([1.0] * 10), evaluated([0.0] * 10))
    assert (few.state, "10 tasks are too few" in few.reason) == (State.REJECTED, True)
    nothing = decision(evaluated(SAME), evaluated(SAME, mode="sampled"))
    assert (nothing.state, nothing.reason) == (State.REJECTED, "No task was evaluated with both versions.")


@pytest.mark.parametrize(
    ("figure", "before", "now", "allowed", "says"),
    [
        ("tool_results/failed", 0.0, 0.2, 0.1, "tool calls that fail rose from 0.000 to 0.200"),
        ("answers/empty", 0.01, 0.1, 0.05, "empty answers rose from 0.010 to 0.100"),
        ("answers/refused", 0.0, 0.06, 0.05, "answers that refuse rose"),
        ("answers/question", 0.1, 0.5, 0.25, "answers that end with a question rose"),
        ("length/response", 20.0, 45.0, 40.0, "responses grew from 20 to 45 tokens on eval, greedy"),
    ],
)
def test_what_the_reward_does_not_see_is_limited(
    figure: str, before: float, now: float, allowed: float, says: str
) -> None:
    candidate, incumbent = evaluated(SAME, **{figure: now}), evaluated(SAME, **{figure: before})
    found = decision(candidate, incumbent)
    assert found.state is State.REJECTED
    assert says in found.reason.lower()
    assert (found.figures[f"eval/greedy/{figure}"], found.figures[f"eval/greedy/{figure}/before"]) == (now, before)
    assert decision(evaluated(SAME, **{figure: allowed}), incumbent).state is State.PASSED
    assert decision(incumbent, candidate).state is State.PASSED, "a fall is no harm"


def test_how_far_a_version_may_be_from_the_served_one_is_limited() -> None:
    far = {**NEAR, "eval_other/sampled/kl": 0.7}
    found = decision(evaluated(SAME), evaluated(SAME), divergence=far)
    assert found.state is State.REJECTED
    assert found.reason == "It is 0.700 nats per token from the served version on eval_other, sampled (more than 0.5)."
    assert found.figures["eval_other/sampled/kl"] == 0.7
    assert decision(evaluated(SAME), evaluated(SAME), divergence=NEAR).state is State.PASSED
    broken = decision(evaluated(SAME), evaluated(SAME), divergence={"eval/sampled/kl": float("nan")})
    assert broken.state is State.REJECTED
    unknown = decision(evaluated(SAME), evaluated(SAME), divergence={})
    assert unknown.reason == "No sampled reply showed how far it is from the served version."
