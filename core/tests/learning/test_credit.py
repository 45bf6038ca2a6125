"""Credit rules: what each conserves, and what must not change their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.builtin.credit import discounted, identical, immediate, stepwise
from agl_core.learning import BatchPlan, PolicyCredit, build_episode, make_batches
from agl_core.returns import episode_return
from agl_core.types import CreditKind, Episode

from .credited_episodes import EPISODES, GROUPS, REWARDS, STEPS, Step, episode, group, rewarded

Rule = Callable[[Sequence[Episode]], list[list[float]]]


def solvers(rule: Rule, kind: CreditKind) -> BatchPlan:
    """The rule for the only policy, of whose agents the solver is trained."""
    return BatchPlan({"default": PolicyCredit("the rule", rule, kind)}, ["solver"])


def rewards(*values: float) -> list[Step]:
    return [Step(value, state=i) for i, value in enumerate(values)]


def near(values: Any) -> Any:
    return pytest.approx(values, abs=1e-9)


class TestImmediate:
    @given(steps=st.lists(STEPS, min_size=1, max_size=6), terminal=REWARDS)
    def test_rewards_of_untrained_agents_stay_in_the_return_of_the_trained_calls_before_them(
        self, make: Any, steps: list[Step], terminal: float
    ) -> None:
        one = episode(make, 0, steps, terminal)
        prepared = make_batches([[one]], solvers(immediate, CreditKind.REWARD))
        trained = [i for i, step in enumerate(steps) if step.agent == "solver"]
        if not trained:
            assert prepared.batches == {}
            return
        batch = prepared.batches["default"]
        assert batch.turn_N.tolist() == trained
        to_go = np.cumsum(batch.values_N[::-1])[::-1]
        whole = discounted([one], gamma=1.0)[0]
        assert to_go.tolist() == near([whole[i] for i in trained])

    @given(member=EPISODES)
    def test_the_values_sum_to_the_return(self, make: Any, member: tuple[list[Step], float]) -> None:
        one = episode(make, 0, *member)
        assert math.fsum(immediate([one])[0]) == near(episode_return(one))

    def test_the_choices_of_the_last_call_carry_it_alike(self, make: Any) -> None:
        built = build_episode(
            make.rollout(), make.attempt(), [make.call(0), make.call(1, make.choice(0), make.choice(1))]
        )
        assert immediate([replace(built, terminal=1.0)]) == [[0.0, 1.0, 1.0]]
        assert immediate([episode(make, 0, rewards(0.25, -0.5, 0.125), 1.0)]) == [[0.25, -0.5, 1.125]]


class TestDiscounted:
    def test_the_worked_example(self, make: Any) -> None:
        assert discounted([episode(make, 0, rewards(0.3, 0.2, 0.0), 1.0)]) == [near([1.29, 1.10, 1.00])]
        assert discounted([episode(make, 0, rewards(0.3, 0.2, 1.0), 0.0)]) == [near([1.29, 1.10, 1.00])]

    @given(member=EPISODES, gamma=st.floats(0, 1))
    def test_every_reward_can_be_read_off_again(
        self, make: Any, member: tuple[list[Step], float], gamma: float
    ) -> None:
        one = episode(make, 0, *member)
        values = discounted([one], gamma=gamma)[0]
        after = [*values[1:], 0.0]
        assert [g - gamma * later for g, later in zip(values, after, strict=True)] == near(immediate([one])[0])

    @pytest.mark.parametrize(("gamma", "first"), [(1.0, [16.0, 18.0]), (0.5, [8.5, 10.5])])
    def test_a_call_is_worth_the_mean_of_its_choices_to_the_call_before(
        self, make: Any, gamma: float, first: list[float]
    ) -> None:
        two = (make.choice(0), make.choice(1))
        built = build_episode(make.rollout(), make.attempt(), [make.call(0, *two), make.call(1, *two)])
        earned = zip(built.transitions, (1.0, 3.0, 10.0, 20.0), strict=True)
        one = replace(built, transitions=tuple(rewarded(t, reward) for t, reward in earned), terminal=0.0)
        assert discounted([one], gamma=gamma) == [[*first, 10.0, 20.0]]
        assert episode_return(one) == 17.0


class TestIdentical:
    @given(member=EPISODES)
    def test_the_mean_is_the_return(self, make: Any, member: tuple[list[Step], float]) -> None:
        one = episode(make, 0, *member)
        assert fmean(identical([one])[0]) == near(episode_return(one))


class TestStepwise:
    @given(members=GROUPS, gamma=st.sampled_from([0.5, 1.0]))
    def test_at_a_shared_state_the_mean_over_rollouts_is_the_groups_and_elsewhere_the_value_is_the_return(
        self, make: Any, members: list[tuple[list[Step], float]], gamma: float
    ) -> None:
        episodes = group(make, members)
        values = stepwise(episodes, gamma=gamma)
        met: dict[int, dict[int, list[float]]] = {}
        for i, (steps, _) in enumerate(members):
            for step, value in zip(steps, values[i], strict=True):
                met.setdefault(step.state, {}).setdefault(i, []).append(value)
        baseline = fmean(episode_return(e) for e in episodes)
        for by_rollout in met.values():
            if len(by_rollout) > 1:
                assert fmean(fmean(found) for found in by_rollout.values()) == near(baseline)
            else:
                [(i, found)] = by_rollout.items()
                assert found == [episode_return(episodes[i])] * len(found)

    @given(members=GROUPS)
    def test_differences_at_a_shared_state_are_differences_of_what_came_after(
        self, make: Any, members: list[tuple[list[Step], float]]
    ) -> None:
        episodes = group(make, [([Step(state=9), *steps, Step(state=8)], terminal) for steps, terminal in members])
        values, to_go = stepwise(episodes), discounted(episodes, gamma=1.0)
        for at in (0, -1):
            moved = [v[at] - v0 for v, v0 in zip(values, (values[0][at],) * len(values), strict=True)]
            assert moved == near([g[at] - to_go[0][at] for g in to_go])

    @given(steps=st.lists(st.lists(STEPS.map(lambda s: replace(s, reward=0.0)), min_size=1), min_size=1, max_size=5))
    @pytest.mark.parametrize("terminal", [0.1, 1 / 3, -0.7])
    def test_rollouts_of_equal_return_get_equal_values_to_the_last_bit(
        self, make: Any, steps: list[list[Step]], terminal: float
    ) -> None:
        values = stepwise(group(make, [(each, terminal) for each in steps]))
        assert {value for of_episode in values for value in of_episode} == {terminal}

    def test_a_step_is_judged_among_those_who_stood_there(self, make: Any) -> None:
        """Asking memory (state 1) pays in two of three rollouts, not asking it (state 2) never."""
        asked, not_asked = [Step(state=0), Step(state=1)], [Step(state=0), Step(state=2)]
        episodes = group(make, [(asked, 1.0), (asked, 1.0), (asked, 0.0), (not_asked, 0.0), (not_asked, 0.0)])
        values = stepwise(episodes)
        assert [v[0] for v in values] == near([1.0, 1.0, 0.0, 0.0, 0.0])
        third = 1 / 3
        assert [v[1] for v in values] == near([0.4 + third, 0.4 + third, 0.4 - 2 * third, 0.4, 0.4])

    def test_calls_without_token_ids_or_of_another_policy_share_no_state(self, make: Any) -> None:
        first, second, third = group(make, [([Step()], 1.0), ([Step()], 0.0), ([Step(state=1)], 0.0)])
        assert stepwise([first, second, third]) == [near([5 / 6]), near([-1 / 6]), [0.0]]
        for change in ({"policy": "other"}, {"prompt_ids": None}):
            changed = replace(second, transitions=(replace(second.transitions[0], **change),))
            assert stepwise([first, changed, third]) == [[1.0], [0.0], [0.0]]
