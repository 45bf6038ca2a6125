"""The gate and the canary: what has to be shown before a version answers anybody, and everybody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agl_online.config import CanarySection, GateSection
from agl_online.trials import Outcome, decide_at_gate, judge_canary, lower_bound
from agl_online.versions import DecidedBy, Decision, State
from agl_server.training.evaluation import Evaluation, TaskScore

SAME = np.random.default_rng(0).random(100) < 0.6
NEAR = {"eval/sampled/kl": 0.02}


def evaluated(rewards: Any, mode: str = "greedy", **shares: float) -> Evaluation:
    scores = [TaskScore("eval", mode, f"task-{number}", (float(reward),)) for number, reward in enumerate(rewards)]
    metrics = {"reward/mean": float(np.mean(rewards)), "length/response": 20.0, **shares}
    return Evaluation(metrics={f"eval/{mode}/{key}": value for key, value in metrics.items()}, scores=scores)


def decision(
    candidate: Evaluation,
    incumbent: Evaluation,
    divergence: Mapping[str, float] = NEAR,
    **limits: float,
) -> Decision:
    settings = GateSection(**limits)
    result = decide_at_gate(20, candidate, incumbent, settings, divergence=divergence)
    assert (result.step, result.by) == (20, DecidedBy.GATE)
    return result


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
    result = decision(candidate, incumbent)
    assert result.state is State.REJECTED
    assert says in result.reason.lower()
    assert (result.figures[f"eval/greedy/{figure}"], result.figures[f"eval/greedy/{figure}/before"]) == (now, before)
    assert decision(evaluated(SAME, **{figure: allowed}), incumbent).state is State.PASSED
    assert decision(incumbent, candidate).state is State.PASSED, "a fall is no harm"


def test_how_far_a_version_may_be_from_the_served_one_is_limited() -> None:
    far = {**NEAR, "eval_other/sampled/kl": 0.7}
    result = decision(evaluated(SAME), evaluated(SAME), divergence=far)
    assert result.state is State.REJECTED
    assert result.reason == "It is 0.700 nats per token from the served version on eval_other, sampled (more than 0.5)."
    assert result.figures["eval_other/sampled/kl"] == 0.7
    assert decision(evaluated(SAME), evaluated(SAME), divergence=NEAR).state is State.PASSED
    broken = decision(evaluated(SAME), evaluated(SAME), divergence={"eval/sampled/kl": float("nan")})
    assert broken.state is State.REJECTED
    unknown = decision(evaluated(SAME), evaluated(SAME), divergence={})
    assert unknown.reason == "No sampled reply showed how far it is from the served version."


STABLE, CANARY = 10, 20
SETTINGS = CanarySection(share=0.4, tolerance=0.15)
LOOKS = (20, 60, 150, 400, 1000, 2500)
"""Sessions of both arms after which the question is asked."""

Draw = Callable[[np.random.Generator], float]


def sessions(seed: int, count: int, canary: Draw, stable: Draw, share: float = 0.4) -> list[Outcome]:
    """Sessions of both arms, in the order in which they came."""
    rng = np.random.default_rng(seed)
    arms = rng.random(count) < share
    return [
        Outcome(CANARY if is_canary else STABLE, f"user-{number}", (canary if is_canary else stable)(rng))
        for number, is_canary in enumerate(arms)
    ]


def decided(
    outcomes: Sequence[Outcome], settings: CanarySection, looks: Iterable[int] = LOOKS
) -> tuple[State, int] | None:
    """The first decision, and after how many sessions of both arms it fell."""
    for count in looks:
        seen = judge_canary(CANARY, STABLE, outcomes[:count], settings)
        if seen is not None:
            assert seen.step == CANARY
            return seen.state, count
    return None


def solved(share: float) -> Draw:
    return lambda rng: float(rng.random() < share)


@pytest.mark.parametrize(
    "draw",
    [solved(0.5), solved(0.05), lambda rng: rng.beta(0.3, 0.3), lambda rng: 0.7],
    ids=["half", "rare", "at the ends", "constant"],
)
def test_the_bounds_hold_at_all_times_at_once(draw: Draw) -> None:
    """The running bounds err at any time if they err at the end, for they only close in."""
    rng = np.random.default_rng(7)
    mean = float(np.mean([draw(rng) for _ in range(20_000)]))
    missed = 0
    for _ in range(100):
        missed += lower_bound(np.array([draw(rng) for _ in range(400)]), 0.1) > mean + 0.01
    assert missed <= 10, "0.1 of 100"
    assert lower_bound(np.array([draw(rng) for _ in range(3000)]), 0.1) > mean - 0.06, "it closes in"


def tried(canary: Draw, stable: Draw) -> Counter[State | None]:
    """How often each decision fell in 40 tries."""
    results = (decided(sessions(seed, LOOKS[-1], canary, stable), SETTINGS) for seed in range(40))
    return Counter(r and r[0] for r in results)


def test_a_canary_is_hardly_ever_decided_on_wrongly_and_soon_if_it_is_far_worse() -> None:
    assert tried(solved(0.45), solved(0.6))[State.STABLE] <= 2, "0.05 of 40"
    equal = tried(solved(0.7), solved(0.7))
    assert equal[State.ROLLED_BACK] <= 2
    assert equal[State.STABLE] >= 33
    worse = [decided(sessions(seed, 1000, solved(0.2), solved(0.6)), SETTINGS, LOOKS[:5]) for seed in range(20)]
    assert {r and r[0] for r in worse} == {State.ROLLED_BACK}
    assert sum(count <= 150 for _, count in worse) >= 10


def test_a_change_that_both_versions_see_says_nothing() -> None:
    """Users begin to want something else halfway, and both versions fail more often."""
    results = []
    for seed in range(40):
        before = sessions(seed, 200, solved(0.9), solved(0.9), share=0.1)
        after = sessions(1000 + seed, 600, solved(0.3), solved(0.3), share=0.5)
        after = [replace(s, name=f"late-{s.name}") for s in after]
        results.append(decided([*before, *after], CanarySection(tolerance=0.01), (200, 300, 500, 800)))
    assert sum(r is not None and r[0] is State.ROLLED_BACK for r in results) <= 2


def test_rewards_have_a_range() -> None:
    outcomes = [replace(s, reward=10 * (s.reward or 0.0) - 5) for s in sessions(1, 600, solved(1), solved(0))]
    settings = CanarySection(reward=(-5, 5), tolerance=0.5)
    late = judge_canary(CANARY, STABLE, outcomes, settings)
    assert late.state is State.STABLE
    assert (late.figures["canary/reward"], late.figures["stable/reward"]) == (5.0, -5.0)
    assert 5 < late.figures["difference/low"] < 10


def test_no_user_outweighs_others() -> None:
    """One user floods the canary with bad sessions."""
    fair = sessions(3, 400, solved(0.9), solved(0.7))
    flood = [Outcome(CANARY, "angry", 0.0, {"answers/empty": 1.0, "tool_results/failed": 1.0}) for _ in range(500)]
    mixed = [s for pair in zip(fair, [*flood[:400]], strict=True) for s in pair]
    assert decided(fair, SETTINGS, [400]) == (State.STABLE, 400)
    assert decided(mixed, SETTINGS, [800]) == (State.STABLE, 800)


@pytest.mark.parametrize(
    ("share", "says"), [("tool_results/failed", "tool calls that fail"), ("answers/empty", "empty answers")]
)
def test_a_limit_trips_after_few_sessions_whatever_the_reward(share: str, says: str) -> None:
    outcomes: list[Outcome] = []
    while (seen := judge_canary(CANARY, STABLE, outcomes, SETTINGS)) is None:
        number = len(outcomes)
        is_canary = number % 5 == 0
        bad = {share: 1.0} if is_canary else {}
        outcomes.append(Outcome(CANARY if is_canary else STABLE, f"user-{number}", None, bad))
    assert seen.state is State.ROLLED_BACK
    assert says in seen.reason
    assert seen.figures["canary/sessions"] <= 12


def test_what_stays_undecided_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_online.trials._MAX_SESSIONS", 300)
    outcomes = sessions(5, 2000, solved(0.5), solved(0.5))
    settings = CanarySection(tolerance=0.01)
    seen = judge_canary(CANARY, STABLE, outcomes, settings)
    assert (seen.state, "Nothing showed in time" in seen.reason) == (State.ROLLED_BACK, True)
    silent = [replace(outcome, reward=None) for outcome in outcomes]
    assert judge_canary(CANARY, STABLE, silent, settings) is None, "missing feedback is missing, not 0"
