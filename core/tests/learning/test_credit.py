"""Credit rules: what each conserves, and what must not change their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.builtin.credit import discounted, identical, immediate, stepwise
from agl_core.learning.transitions import build_episode
from agl_core.testing import episodes as make
from agl_core.types import Episode, episode_return

from .credited_episodes import EPISODES, GROUPS, STEPS, Step, episode, group, rewarded

Rule = Callable[[Sequence[Episode]], list[list[float]]]


def rewards(*values: float) -> list[Step]:
    return [Step(value, state=i) for i, value in enumerate(values)]


def near(values: Any) -> Any:
    return pytest.approx(values, abs=1e-9)


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
        assert immediate([episode(0, rewards(0.25, -0.5, 0.125), 1.0)]) == [[0.25, -0.5, 1.125]]


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


class TestStepwise:
    @given(members=GROUPS, gamma=st.sampled_from([0.5, 1.0]))
    def test_at_a_shared_state_the_mean_over_rollouts_is_the_groups_and_elsewhere_the_value_is_the_return(
        self, members: list[tuple[list[Step], float]], gamma: float
    ) -> None:
        episodes = group(members)
        values = stepwise(episodes, gamma=gamma)
        met: dict[int, dict[int, list[float]]] = {}
        for i, (steps, _) in enumerate(members):
            for step, value in zip(steps, values[i], strict=True):
                met.setdefault(step.state, {}).setdefault(i, []).append(value)
        baseline = fmean(episode_return(e) for e in episodes)
        for by_rollout in met.values():
            if len(by_rollout) > 1:
                assert fmean(fmean(values_there) for values_there in by_rollout.values()) == near(baseline)
            else:
                [(i, values_there)] = by_rollout.items()
                assert values_there == [episode_return(episodes[i])] * len(values_there)

    @given(members=GROUPS)
    def test_differences_at_a_shared_state_are_differences_of_what_came_after(
        self, members: list[tuple[list[Step], float]]
    ) -> None:
        episodes = group([([Step(state=9), *steps, Step(state=8)], terminal) for steps, terminal in members])
        values, to_go = stepwise(episodes), discounted(episodes, gamma=1.0)
        for at in (0, -1):
            moved = [v[at] - v0 for v, v0 in zip(values, (values[0][at],) * len(values), strict=True)]
            assert moved == near([g[at] - to_go[0][at] for g in to_go])

    @given(steps=st.lists(st.lists(STEPS.map(lambda s: replace(s, reward=0.0)), min_size=1), min_size=1, max_size=5))
    @pytest.mark.parametrize("terminal", [0.1, 1 / 3, -0.7])
    def test_rollouts_of_equal_return_get_equal_values_to_the_last_bit(
        self, steps: list[list[Step]], terminal: float
    ) -> None:
        values = stepwise(group([(step, terminal) for step in steps]))
        assert {value for of_episode in values for value in of_episode} == {terminal}

    def test_calls_without_token_ids_or_of_another_policy_share_no_state(self) -> None:
        first, second, third = group([([Step()], 1.0), ([Step()], 0.0), ([Step(state=1)], 0.0)])
        assert stepwise([first, second, third]) == [near([5 / 6]), near([-1 / 6]), [0.0]]
        for change in ({"policy": "other"}, {"prompt_ids": None}):
            changed = replace(second, transitions=(replace(second.transitions[0], **change),))
            assert stepwise([first, changed, third]) == [[1.0], [0.0], [0.0]]
