"""Properties of every credit rule that agl ships, wherever it comes from: each installed one is found and tried."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core import kinds
from agl_core.learning.batch import BatchPlan, PolicyCredit, make_batches
from agl_core.learning.transitions import build_episode
from agl_core.plugins import Plugins
from agl_core.protocols import CreditRule
from agl_core.testing import episodes as make
from agl_core.types import CreditKind, Episode, TransitionKey

from .credited_episodes import GROUPS, REWARDS, STEPS, Step, episode, group

VARIANTS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "discounted": [{"gamma": 0.0}, {"gamma": 1.0}],
    "stepwise": [{"gamma": 0.5}],
    "air": [{"alpha": 0.7}, {"reward": "return"}, {"alpha": 0.0, "reward": "return"}],
}
"""Settings to try beside the defaults."""


@dataclass(frozen=True)
class Variant:
    """A rule as a run may have it."""

    name: str
    rule: CreditRule
    kind: CreditKind

    def __str__(self) -> str:
        return f"{self.name} as {self.kind}"


def shipped() -> list[Variant]:
    """Each rule of the installed agl packages, with each of its settings, for each kind of its values."""
    return [
        Variant(f"{name} {dict(chosen)}" if chosen else name, component.build(component.options(**chosen)), kind)
        for name, component in Plugins.load().components(kinds.CREDIT).items()
        if component.origin.startswith("agl-")
        for chosen in ({}, *VARIANTS.get(name, ()))
        for kind in sorted(component.yields)
    ]


RULES = shipped()
rules = pytest.mark.parametrize("variant", RULES, ids=str)


def trained_on(variant: Variant, episodes: Sequence[Episode], *agents: str) -> dict[TransitionKey, float]:
    """The values in the batch of a run that trains these agents."""
    plan = BatchPlan({"default": PolicyCredit(variant.name, variant.rule, variant.kind)}, agents)
    batches = make_batches([episodes], plan).batches.values()
    return {key: float(value) for b in batches for key, value in zip(b.keys, b.values_N, strict=True)}


def values_of(variant: Variant, episodes: Sequence[Episode]) -> dict[TransitionKey, float]:
    """The rule's own values, by transition."""
    credited = variant.rule(episodes)
    return {
        t.key: value
        for one, values in zip(episodes, credited, strict=True)
        for t, value in zip(one.transitions, values, strict=True)
    }


def near(values: Any) -> Any:
    return pytest.approx(values, abs=1e-6)


def test_every_rule_that_is_shipped_is_tried() -> None:
    names = {variant.name for variant in RULES}
    assert {"identical", "immediate", "discounted", "stepwise"} <= names
    if importlib.util.find_spec("agl_rewards"):
        assert {"air", "air {'alpha': 0.7}", "air {'reward': 'return'}"} <= names
    assert {variant.kind for variant in RULES if variant.name == "immediate"} == {CreditKind.REWARD, CreditKind.RETURN}


@rules
@given(terminals=st.lists(REWARDS, min_size=1, max_size=6))
def test_one_call_episodes_are_single_turn_learning(variant: Variant, terminals: list[float]) -> None:
    assert variant.rule(group([([Step()], terminal) for terminal in terminals])) == [[end] for end in terminals]


@rules
@given(members=GROUPS, data=st.data())
def test_more_choices_that_earn_as_much_change_nothing(
    variant: Variant, members: list[tuple[list[Step], float]], data: st.DataObject
) -> None:
    episodes = group(members)
    times = [[data.draw(st.integers(1, 3)) for _ in one.transitions] for one in episodes]
    repeated = [repeat(one, of_episode) for one, of_episode in zip(episodes, times, strict=True)]
    expected = {(key.rollout, key.call): value for key, value in values_of(variant, episodes).items()}
    for key, value in values_of(variant, repeated).items():
        assert value == near(expected[key.rollout, key.call])


def repeat(one: Episode, times: Sequence[int]) -> Episode:
    """The episode whose calls gave each choice as often as said."""
    choices = [
        replace(t, key=t.key._replace(choice=n))
        for t, count in zip(one.transitions, times, strict=True)
        for n in range(count)
    ]
    return replace(one, transitions=tuple(choices))


@rules
def test_nothing_has_no_values(variant: Variant) -> None:
    nothing = replace(build_episode(make.rollout(), make.attempt(), []), terminal=1.0)
    assert variant.rule([]) == []
    assert variant.rule([nothing]) == [[]]
    unrewarded = build_episode(make.rollout(), make.attempt(), [make.call(0), make.call(1)])
    assert variant.rule([unrewarded]) == [[0.0, 0.0]]


@rules
@given(members=GROUPS)
def test_untrained_agents_are_never_in_the_loss_and_change_no_return(
    variant: Variant, members: list[tuple[list[Step], float]]
) -> None:
    episodes = group(members)
    agents = {t.key: t.agent for e in episodes for t in e.transitions}
    trained = trained_on(variant, episodes, "solver")
    assert trained.keys() == {key for key, agent in agents.items() if agent == "solver"}
    if variant.kind is CreditKind.RETURN:
        expected = values_of(variant, episodes)
        assert trained == near({key: expected[key] for key in trained})


@rules
@given(steps=st.lists(STEPS, min_size=1, max_size=6), terminal=REWARDS)
def test_a_call_is_worth_the_same_whoever_else_is_trained(variant: Variant, steps: list[Step], terminal: float) -> None:
    one = episode(0, [replace(steps[0], agent="solver"), *steps[1:]], terminal)
    assert worth_of_the_first(variant, one, "solver") == near(worth_of_the_first(variant, one, "*"))


def worth_of_the_first(variant: Variant, one: Episode, *agents: str) -> float:
    """The first call's worth to the algorithm, which adds rewards up and takes returns as they are."""
    values = trained_on(variant, [one], *agents)
    return sum(values.values()) if variant.kind is CreditKind.REWARD else values[one.transitions[0].key]
