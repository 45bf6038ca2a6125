"""Credited episodes become ragged batches, and nothing disappears without a reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.builtin.credit import identical, immediate
from agl_core.errors import PluginError
from agl_core.learning import PolicyCredit, build_episode, make_batches
from agl_core.learning.trainable import unusable
from agl_core.types import CreditKind, DropReason, Ending, Episode

IDENTICAL = {"default": PolicyCredit("identical", identical, CreditKind.RETURN)}


def episode(make: Any, name: str, lengths: list[int], terminal: float, **changes: Any) -> Episode:
    calls = [
        make.call(i, make.choice(tokens=n), rollout=name, agent="solver" if i % 2 == 0 else "critic")
        for i, n in enumerate(lengths)
    ]
    built = build_episode(make.rollout(name), make.attempt(name), calls)
    return replace(built, terminal=terminal, **changes)


@given(data=st.data())
def test_every_transition_is_in_the_batch_or_dropped_with_a_reason(make: Any, data: st.DataObject) -> None:
    sizes = st.lists(st.integers(0, 5), min_size=0, max_size=4)
    groups = [
        [
            episode(
                make, f"g{g}m{m}", lengths, float(g - m), dropped=data.draw(st.sampled_from([None, DropReason.ENDING]))
            )
            for m, lengths in enumerate(members)
        ]
        for g, members in enumerate(
            data.draw(st.lists(st.lists(sizes, min_size=1, max_size=3), min_size=1, max_size=3))
        )
    ]
    prepared = make_batches(groups, IDENTICAL, agents=["solver"], min_group_size=2)
    kept = [key for batch in prepared.batches.values() for key in batch.keys]
    left_out = [record.key for record in prepared.dropped]
    assert sorted(kept + left_out) == sorted(t.key for g in groups for e in g for t in e.transitions)
    assert all(record.dropped is not None and record.weight == 0 for record in prepared.dropped)
    by_key = {t.key: (t, e) for g in groups for e in g for t in e.transitions}
    for batch in prepared.batches.values():
        assert batch.offsets[-1] == len(batch.tokens_T)
        assert batch.response_offsets[-1] == len(batch.behaviour_logprobs_R) == len(batch.mask_R)
        for i, key in enumerate(batch.keys):
            transition, of = by_key[key]
            tokens = batch.tokens_T[batch.offsets[i] : batch.offsets[i + 1]]
            assert transition.prompt_ids is not None
            assert transition.response_ids is not None
            assert tokens.tolist() == [*transition.prompt_ids.tolist(), *transition.response_ids.tolist()]
            assert batch.prompt_lengths_N[i] == len(transition.prompt_ids)
            assert batch.values_N[i] == of.terminal
            assert transition.agent == "solver"


def test_rollouts_and_groups_are_numbered_for_the_statistics(make: Any) -> None:
    groups = [
        [episode(make, "a", [2, 2, 2], 1.0), episode(make, "b", [2], 0.0)],
        [episode(make, "c", [1], 1.0), episode(make, "d", [1], 0.0)],
    ]
    batch = make_batches(groups, IDENTICAL).batches["default"]
    assert batch.group_N.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.rollout_N.tolist() == [0, 0, 0, 1, 2, 3]
    assert batch.turn_N.tolist() == [0, 1, 2, 0, 0, 0]


def test_a_batch_is_of_its_training_step(make: Any) -> None:
    groups = [[conversation(make, "a", 1.0), conversation(make, "b", 0.0)]]
    credit = {name: PolicyCredit("identical", identical, CreditKind.RETURN) for name in ("author", "judge")}
    assert {batch.step for batch in make_batches(groups, credit, step=7).batches.values()} == {7}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"response_ids": None}, DropReason.NO_TOKEN_IDS),
        ({"logprobs": None}, DropReason.NO_LOGPROBS),
        ({"logprobs": np.array([-1.0, np.nan, -1.0], np.float32)}, DropReason.NON_FINITE),
        ({"logprobs": np.array([-1.0, -np.inf, -1.0], np.float32)}, DropReason.NON_FINITE),
        ({"response_ids": np.array([], np.int32), "logprobs": np.array([], np.float32)}, DropReason.EMPTY_RESPONSE),
        ({"mask": np.zeros(3, np.bool_)}, DropReason.FULLY_MASKED),
    ],
)
def test_a_faulty_transition_is_dropped_with_its_reason(make: Any, changes: Any, reason: DropReason) -> None:
    calls = [make.call(0, make.choice(**changes)), make.call(1)]
    built = replace(build_episode(make.rollout(), make.attempt(), calls), terminal=1.0)
    prepared = make_batches([[built]], IDENTICAL)
    assert [record.dropped for record in prepared.dropped] == [reason]
    assert [key.call for key in prepared.batches["default"].keys] == ["r-c1"]


def test_a_masked_token_may_have_any_log_probability(make: Any) -> None:
    """It is none of the policy's, so nothing that is recorded of it counts."""
    logprobs, mask = np.array([-1.0, np.nan, -np.inf], np.float32), np.array([True, False, False])
    calls = [make.call(0, make.choice(logprobs=logprobs, mask=mask)), make.call(1)]
    built = replace(build_episode(make.rollout(), make.attempt(), calls), terminal=1.0)
    prepared = make_batches([[built]], IDENTICAL)
    assert prepared.dropped == ()
    assert unusable(prepared.batches["default"]) == (None, None)


def test_what_an_unusable_call_earned_goes_to_the_call_before_it(make: Any) -> None:
    broken = make.choice(logprobs=np.array([-1.0, np.nan, -1.0], np.float32))
    built = build_episode(make.rollout(), make.attempt(), [make.call(0), make.call(1, broken)])
    credit = {"default": PolicyCredit("immediate", immediate, CreditKind.REWARD)}
    prepared = make_batches([[replace(built, terminal=1.0)]], credit)
    assert prepared.batches["default"].values_N.tolist() == [1.0]


def test_a_groups_weight_is_that_of_its_transitions_in_every_batch(make: Any) -> None:
    lost = [episode(make, "x", [2], 1.0, dropped=DropReason.ENDING), episode(make, "y", [2], 0.0)]
    groups = [
        lost,
        [conversation(make, "a", 1.0), conversation(make, "b", 0.0)],
        [episode(make, "c", [1], 1.0), episode(make, "d", [1, 1], 0.0)],
    ]
    credit = {name: PolicyCredit("identical", identical, CreditKind.RETURN) for name in ("author", "judge", "default")}

    batches = make_batches(groups, credit, weights=[5.0, 0.5, 0.25], min_group_size=2).batches

    assert {name: batch.weight_N.tolist() for name, batch in batches.items()} == {
        "author": [0.5] * 4,
        "judge": [0.5] * 4,
        "default": [0.25] * 3,
    }
    assert make_batches(groups, credit).batches["judge"].weight_N.tolist() == [1.0] * 4


def test_a_group_that_lost_too_many_members_is_dropped_whole(make: Any) -> None:
    groups = [[episode(make, "a", [2], 1.0), episode(make, "b", [2], 0.0, dropped=DropReason.ENDING)]]
    prepared = make_batches(groups, IDENTICAL, min_group_size=2)
    assert prepared.batches == {}
    assert prepared.episodes_dropped == {DropReason.GROUP_TOO_SMALL: 1, DropReason.ENDING: 1}


def test_forced_tokens_are_masked_and_the_rest_is_trained(make: Any) -> None:
    mask = np.array([False, True, True])
    built = build_episode(make.rollout(), make.attempt(), [make.call(0, make.choice(mask=mask))])
    batch = make_batches([[replace(built, terminal=1.0)]], IDENTICAL).batches["default"]
    assert batch.mask_R.tolist() == mask.tolist()


def test_a_credit_that_is_not_finite_drops_its_transition(make: Any) -> None:
    groups = [[episode(make, "a", [2, 2], 1.0)]]
    prepared = make_batches(
        groups, {"default": PolicyCredit("endless", lambda e: [[math.inf, 1.0]], CreditKind.RETURN)}
    )
    assert [record.dropped for record in prepared.dropped] == [DropReason.NON_FINITE]
    assert prepared.batches["default"].values_N.tolist() == [1.0]


def conversation(make: Any, name: str, terminal: float) -> Episode:
    """A writer, a critic and an editor by turns; writer and editor have one policy, the critic its own."""
    agents = ["writer", "critic", "editor", "critic"]
    policies = ["author", "judge", "author", "judge"]
    calls = [
        make.call(i, rollout=name, agent=agent, policy=policy)
        for i, (agent, policy) in enumerate(zip(agents, policies, strict=True))
    ]
    return replace(build_episode(make.rollout(name), make.attempt(name), calls), terminal=terminal)


def numbered(episodes: Sequence[Episode]) -> list[list[float]]:
    """A rule that tells which transitions it saw: 100 times how many, and the place."""
    total = sum(len(episode.transitions) for episode in episodes)
    return [[100.0 * total + i for i in range(len(episode.transitions))] for episode in episodes]


def test_each_policy_is_credited_by_its_own_rule_over_the_whole_group(make: Any) -> None:
    groups = [[conversation(make, "a", 1.0), conversation(make, "b", 0.0)]]
    credit = {
        "author": PolicyCredit("identical", identical, CreditKind.RETURN),
        "judge": PolicyCredit("numbered", numbered, CreditKind.RETURN),
    }
    batches = make_batches(groups, credit).batches
    assert list(batches) == ["author", "judge"]
    assert batches["author"].values_N.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert batches["author"].turn_N.tolist() == [0, 2, 0, 2]
    assert batches["judge"].values_N.tolist() == [801.0, 803.0, 801.0, 803.0]
    assert batches["judge"].turn_N.tolist() == [1, 3, 1, 3]
    assert batches["judge"].scores_N.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_a_policy_may_take_rewards_and_another_returns(make: Any) -> None:
    credit = {
        "author": PolicyCredit("numbered", numbered, CreditKind.REWARD),
        "judge": PolicyCredit("numbered", numbered, CreditKind.RETURN),
    }
    prepared = make_batches([[conversation(make, "a", 1.0)]], credit)
    author, judge = prepared.batches["author"], prepared.batches["judge"]
    assert (author.kind, judge.kind) == (CreditKind.REWARD, CreditKind.RETURN)
    # What the judge earns comes to the author's call before it, and not the other way round.
    assert author.values_N.tolist() == [400.0 + 401.0, 402.0 + 403.0]
    assert judge.values_N.tolist() == [401.0, 403.0]


def test_a_policy_whose_agents_are_not_trained_has_no_batch_and_its_credit_is_recorded(make: Any) -> None:
    groups = [[conversation(make, "a", 1.0)]]
    credit = {
        "author": PolicyCredit("identical", identical, CreditKind.RETURN),
        "judge": PolicyCredit("numbered", numbered, CreditKind.RETURN),
    }
    prepared = make_batches(groups, credit, agents=["writer", "ed*"])
    assert list(prepared.batches) == ["author"]
    assert [(record.call, record.credit, record.dropped) for record in prepared.dropped] == [
        ("a-c1", 401.0, DropReason.UNTRAINED_AGENT),
        ("a-c3", 403.0, DropReason.UNTRAINED_AGENT),
    ]


def test_a_credit_rule_that_fails_is_named_with_the_group(make: Any) -> None:
    def broken(episodes: Sequence[Episode]) -> list[list[float]]:
        return [[1 / 0]]

    with pytest.raises(PluginError, match=r"'broken' failed on group g: ZeroDivisionError: division by zero\. Mend"):
        PolicyCredit("broken", broken, CreditKind.RETURN).values([episode(make, "a", [1, 1], 1.0)])


def test_a_credit_rule_with_the_wrong_number_of_values_is_named(make: Any) -> None:
    with pytest.raises(PluginError, match=r"'short' gave \[1\] values for episodes of \[2\]"):
        PolicyCredit("short", lambda group: [[1.0]], CreditKind.RETURN).values([episode(make, "a", [1, 1], 1.0)])


def test_an_ending_other_than_finished_keeps_its_transitions(make: Any) -> None:
    built = build_episode(make.rollout(), make.attempt(ending=Ending.TIMED_OUT), [make.call(0)])
    assert built.ending is Ending.TIMED_OUT
    assert len(built.transitions) == 1
