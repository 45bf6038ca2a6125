"""Credit rules: what each conserves, what must not change their values, and what holds of each that is installed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core import kinds
from agl_core.builtin import discounted, identical, immediate
from agl_core.config.resolve import ChosenComponent
from agl_core.learning.batch import BatchPlan, PolicyCredit, make_batches
from agl_core.learning.transitions import build_episode
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.types import CreditKind, Episode, Reward, ToolStatus, Transition, TransitionKey, episode_return
from agl_core.types.episodes import gae

REWARDS = st.floats(-2, 2, width=32)


@dataclass(frozen=True)
class Step:
    """One call of a test's episode."""

    reward: float = 0.0
    state: int = 0
    """Calls of one state have one prompt."""
    agent: str = "solver"
    tool_results: tuple[ToolStatus, ...] = ()
    parse_error: str | None = None


STEPS = st.builds(
    Step,
    REWARDS,
    st.integers(0, 3),
    st.sampled_from(["solver", "critic"]),
    st.lists(st.sampled_from(ToolStatus), max_size=3).map(tuple),
    st.sampled_from([None, "no closing brace"]),
)
EPISODES = st.tuples(st.lists(STEPS, min_size=1, max_size=5), REWARDS)
GROUPS = st.lists(EPISODES, min_size=1, max_size=4)


def episode(member: int, steps: Sequence[Step], terminal: float) -> Episode:
    """The episode of these steps."""
    name = f"r{member}"
    calls = [
        make.call(
            i,
            make.choice(tool_calls=[f"{i}.{n}" for n in range(len(step.tool_results))], parse_error=step.parse_error),
            rollout=name,
            agent=step.agent,
            prompt_ids=np.full(3, step.state, np.int32),
        )
        for i, step in enumerate(steps)
    ]
    tool_results = [
        make.tool_result(f"o{i}.{n}", f"{i}.{n}", rollout=name, status=status)
        for i, step in enumerate(steps)
        for n, status in enumerate(step.tool_results)
    ]
    built = build_episode(make.rollout(name, member=member), make.attempt(name), calls, tool_results)
    by_call = {call.id: step.reward for call, step in zip(calls, steps, strict=True)}
    transitions = tuple(rewarded(t, by_call[t.key.call]) for t in built.transitions)
    return replace(built, transitions=transitions, terminal=terminal)


def rewarded(transition: Transition, value: float) -> Transition:
    """The transition that earned this."""
    key = transition.key
    return replace(transition, rewards=(Reward(key.rollout, 0, "step", value, "test", key.call, key.choice),))


def group(members: Sequence[tuple[Sequence[Step], float]]) -> list[Episode]:
    return [episode(i, steps, terminal) for i, (steps, terminal) in enumerate(members)]


# Each of core's own rules.


def near(values: Any, tolerance: float = 1e-9) -> Any:
    return pytest.approx(values, abs=tolerance)


class TestImmediate:
    @given(member=EPISODES)
    def test_the_values_sum_to_the_return(self, member: tuple[list[Step], float]) -> None:
        one = episode(0, *member)
        assert math.fsum(immediate([one])[0]) == near(episode_return(one))

    def test_the_choices_of_the_last_call_carry_it_alike(self) -> None:
        built = build_episode(
            make.rollout(), make.attempt(), [make.call(0), make.call(1, make.choice(0), make.choice(1))]
        )
        assert immediate([replace(built, terminal=1.0)]) == [[0.0, 1.0, 1.0]]
        steps = [Step(reward, state=i) for i, reward in enumerate((0.25, -0.5, 0.125))]
        assert immediate([episode(0, steps, 1.0)]) == [[0.25, -0.5, 1.125]]


class TestDiscounted:
    @given(member=EPISODES, gamma=st.floats(0, 1))
    def test_every_reward_can_be_read_off_again(self, member: tuple[list[Step], float], gamma: float) -> None:
        one = episode(0, *member)
        values = discounted([one], gamma=gamma)[0]
        after = [*values[1:], 0.0]
        assert [g - gamma * later for g, later in zip(values, after, strict=True)] == near(immediate([one])[0])

    @pytest.mark.parametrize(("gamma", "first"), [(1.0, [16.0, 18.0]), (0.5, [8.5, 10.5])])
    def test_a_call_is_worth_the_mean_of_its_choices_to_the_call_before(self, gamma: float, first: list[float]) -> None:
        two = (make.choice(0), make.choice(1))
        built = build_episode(make.rollout(), make.attempt(), [make.call(0, *two), make.call(1, *two)])
        earned = zip(built.transitions, (1.0, 3.0, 10.0, 20.0), strict=True)
        one = replace(built, transitions=tuple(rewarded(t, reward) for t, reward in earned), terminal=0.0)
        assert discounted([one], gamma=gamma) == [[*first, 10.0, 20.0]]
        assert episode_return(one) == 17.0


class TestIdentical:
    @given(member=EPISODES)
    def test_the_mean_is_the_return(self, member: tuple[list[Step], float]) -> None:
        one = episode(0, *member)
        assert fmean(identical([one])[0]) == near(episode_return(one))


# Every rule that agl ships, wherever it comes from: each installed one is found and tried.


VARIANTS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "discounted": [{"gamma": 0.0}, {"gamma": 1.0}],
    "gigpo": [{"omega": 0.5, "gamma": 0.5}],
    "air": [{"beta": 0.0}, {"form": "mixed", "alpha": 0.7}],
}
"""Settings to try beside the defaults."""


def shipped() -> list[PolicyCredit]:
    """Each rule of the installed agl packages, with each of its settings, for each kind of its values."""
    return [
        PolicyCredit(f"{name} {dict(settings)}" if settings else name, chosen.build(), kind)
        for name, component in Plugins.load().components(kinds.CREDIT).items()
        if component.origin.startswith("agl-")
        for settings in ({}, *VARIANTS.get(name, ()))
        for chosen in [ChosenComponent(component, component.options(**settings))]
        for kind in sorted(chosen.yields)
    ]


RULES = shipped()
rules = pytest.mark.parametrize("credit", RULES, ids=lambda credit: f"{credit.name} as {credit.kind}")


def trained_on(credit: PolicyCredit, episodes: Sequence[Episode], *agents: str) -> dict[TransitionKey, float]:
    """The values in the batch of a run that trains these agents."""
    batches = make_batches([episodes], BatchPlan({"default": credit}, agents)).batches.values()
    return {key: float(value) for b in batches for key, value in zip(b.keys, b.values_N, strict=True)}


def values_of(credit: PolicyCredit, episodes: Sequence[Episode]) -> dict[TransitionKey, float]:
    """The rule's own values, by transition."""
    return {
        t.key: value
        for one, values in zip(episodes, credit.rule(episodes), strict=True)
        for t, value in zip(one.transitions, values, strict=True)
    }


def test_every_rule_that_is_shipped_is_tried() -> None:
    names = {credit.name for credit in RULES}
    assert {"identical", "immediate", "discounted"} <= names
    if importlib.util.find_spec("agl_rewards"):
        assert {"air", "air {'form': 'mixed', 'alpha': 0.7}", "gigpo"} <= names
    assert {credit.kind for credit in RULES if credit.name == "immediate"} == {CreditKind.REWARD, CreditKind.RETURN}


@rules
@given(terminals=st.lists(REWARDS, min_size=1, max_size=6))
def test_one_call_episodes_are_single_turn_learning(credit: PolicyCredit, terminals: list[float]) -> None:
    [*values] = credit.rule(group([([Step(state=i)], terminal) for i, terminal in enumerate(terminals)]))
    if credit.kind is CreditKind.ADVANTAGE:
        spread = stdev(terminals) if len(terminals) > 1 else 0.0
        assert values == [near([(end - fmean(terminals)) / (spread + 1e-6)], 1e-3) for end in terminals]
    else:
        assert values == [[end] for end in terminals]


@rules
@given(members=GROUPS, data=st.data())
def test_more_choices_that_earn_as_much_change_nothing(
    credit: PolicyCredit, members: list[tuple[list[Step], float]], data: st.DataObject
) -> None:
    episodes = group(members)
    times = [[data.draw(st.integers(1, 3)) for _ in one.transitions] for one in episodes]
    repeated = [repeat(one, of_episode) for one, of_episode in zip(episodes, times, strict=True)]
    expected = {(key.rollout, key.call): value for key, value in values_of(credit, episodes).items()}
    for key, value in values_of(credit, repeated).items():
        assert value == near(expected[key.rollout, key.call], 1e-6)


def repeat(one: Episode, times: Sequence[int]) -> Episode:
    """The episode whose calls gave each choice as often as said."""
    choices = [
        replace(t, key=t.key._replace(choice=n))
        for t, count in zip(one.transitions, times, strict=True)
        for n in range(count)
    ]
    return replace(one, transitions=tuple(choices))


@rules
def test_nothing_has_no_values(credit: PolicyCredit) -> None:
    nothing = replace(build_episode(make.rollout(), make.attempt(), []), terminal=1.0)
    assert credit.rule([]) == []
    assert credit.rule([nothing]) == [[]]
    unrewarded = build_episode(make.rollout(), make.attempt(), [make.call(0), make.call(1)])
    assert credit.rule([unrewarded]) == [[0.0, 0.0]]


@rules
@given(members=GROUPS)
def test_untrained_agents_are_never_in_the_loss_and_change_no_return(
    credit: PolicyCredit, members: list[tuple[list[Step], float]]
) -> None:
    episodes = group(members)
    agents = {t.key: t.agent for e in episodes for t in e.transitions}
    trained = trained_on(credit, episodes, "solver")
    assert trained.keys() == {key for key, agent in agents.items() if agent == "solver"}
    if credit.kind is CreditKind.RETURN:
        expected = values_of(credit, episodes)
        assert trained == near({key: expected[key] for key in trained}, 1e-6)


@rules
@given(steps=st.lists(STEPS, min_size=1, max_size=6), terminal=REWARDS)
def test_a_call_is_worth_the_same_whoever_else_is_trained(
    credit: PolicyCredit, steps: list[Step], terminal: float
) -> None:
    one = episode(0, [replace(steps[0], agent="solver"), *steps[1:]], terminal)
    assert worth_of_the_first(credit, one, "solver") == near(worth_of_the_first(credit, one, "*"), 1e-6)


def worth_of_the_first(credit: PolicyCredit, one: Episode, *agents: str) -> float:
    """The first call's worth to the algorithm, which adds rewards up and takes returns as they are."""
    [batch] = make_batches([[one]], BatchPlan({"default": credit}, agents)).batches.values()
    if credit.kind is not CreditKind.REWARD:
        return float(batch.values_N[0])
    trained = {*batch.turn_N.tolist()}
    return gae([m._replace(value=0.0 if m.turn in trained else None) for m in batch.calls[0]], 1.0, 1.0)[0]
