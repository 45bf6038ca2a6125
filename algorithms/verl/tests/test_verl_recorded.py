"""The batch on which the two engines are compared holds what it says."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from agl_core.learning.batch import filter_trainable
from agl_core.types import Batch, CreditKind, DropReason

from . import recorded
from .recorded import Kind

VOCABULARY = 512
REASONS = {
    Kind.STALE: DropReason.STALE,
    Kind.UNTRAINED: DropReason.UNTRAINED_AGENT,
    Kind.DROPPED: DropReason.NON_FINITE,
    Kind.UNKNOWN: DropReason.NON_FINITE,
    Kind.LONG: DropReason.TOO_LONG,
}


@pytest.mark.parametrize("kind", CreditKind)
@pytest.mark.parametrize("seed", range(8))
def test_every_kind_of_call_is_there_and_left_out_for_its_reason(kind: CreditKind, seed: int) -> None:
    made = recorded.record(VOCABULARY, kind, seed)
    assert Counter(made.kinds.values()).keys() == set(Kind)
    for record in made.dropped:
        assert record.dropped == REASONS[made.kinds[record.key]]
    usable = filter_trainable(made.batch, context_length=recorded.TOO_LONG, vocabulary=VOCABULARY)
    for key, reason in zip(made.batch.keys, usable.dropped, strict=True):
        assert reason == REASONS.get(made.kinds[key])
    assert sorted([*made.batch.keys, *(record.key for record in made.dropped)]) == sorted(made.kinds)
    trained = usable.batch
    assert len(set(trained.version_N.tolist())) == 2
    assert len(set(trained.weight_N.tolist())) == 3
    assert max(np.bincount(trained.rollout_N)) > 1, "several turns"
    assert not trained.mask_R.all(), "forced tokens"


def test_what_the_second_agent_earned_is_in_the_return_of_the_first() -> None:
    made = recorded.record(VOCABULARY)
    values = {key.rollout: value for key, value in zip(made.batch.keys, made.batch.values_N, strict=True)}
    first_alone = recorded.record(VOCABULARY, CreditKind.REWARD, agents=("writer", "reviewer"))
    all_rewards: Counter[str] = Counter()
    for key, value in zip(first_alone.batch.keys, first_alone.batch.values_N, strict=True):
        all_rewards[key.rollout] += value  # type: ignore[assignment]
    shared = {key.rollout for key, kind in made.kinds.items() if kind is Kind.UNTRAINED} - {"r1"}
    assert shared
    for rollout in shared:
        assert values[rollout] == pytest.approx(all_rewards[rollout])


@pytest.mark.parametrize("kind", Kind)
def test_other_tokens_reach_the_batch_only_of_calls_that_are_in_it(kind: Kind) -> None:
    made, other = (recorded.record(VOCABULARY, others=each) for each in ((), (kind,)))
    before, after = (filter_trainable(each.batch, context_length=200, vocabulary=512).batch for each in (made, other))
    assert same(before, after) is (kind is not Kind.KEPT)


def test_without_the_bound_on_staleness_and_the_choice_of_agents_they_would_be_trained_on() -> None:
    """What the comparisons of updates are to notice."""
    plain = recorded.record(VOCABULARY).batch
    assert not same(recorded.record(VOCABULARY, stale=False).batch, plain)
    assert not same(recorded.record(VOCABULARY, agents=("*",)).batch, plain)


def same(one: Batch, other: Batch) -> bool:
    return (
        np.array_equal(one.tokens_T, other.tokens_T)
        and np.array_equal(one.values_N, other.values_N)
        and np.array_equal(one.behaviour_logprobs_R, other.behaviour_logprobs_R, equal_nan=True)
    )
