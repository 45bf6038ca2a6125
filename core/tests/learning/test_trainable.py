"""What of a batch can be trained on, and the part of it that remains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agl_core.learning.trainable import filter_trainable, subset, unusable
from agl_core.types import Batch, CreditKind, DropReason, TransitionKey


def batch_of(*lengths: tuple[int, int]) -> Batch:
    """Transitions of one rollout with these prompt and response lengths, all tokens different."""
    count = len(lengths)
    total, responses = sum(map(sum, lengths)), sum(response for _, response in lengths)
    return Batch(
        tokens_T=np.arange(total, dtype=np.int32),
        offsets=np.cumsum([0, *(prompt + response for prompt, response in lengths)]).astype(np.int64),
        prompt_lengths_N=np.array([prompt for prompt, _ in lengths], np.int64),
        response_offsets=np.cumsum([0, *(response for _, response in lengths)]).astype(np.int64),
        behaviour_logprobs_R=-np.arange(1, responses + 1, dtype=np.float32),
        mask_R=np.ones(responses, np.bool_),
        temperature_N=np.ones(count, np.float32),
        values_N=np.arange(count) + 0.5,
        kind=CreditKind.RETURN,
        group_N=np.zeros(count, np.int64),
        rollout_N=np.zeros(count, np.int64),
        turn_N=np.arange(count, dtype=np.int64),
        version_N=np.arange(count, dtype=np.int64),
        scores_N=np.zeros(count),
        keys=tuple(TransitionKey("r", 0, f"c{i}", 0) for i in range(count)),
    )


def test_what_cannot_be_trained_on_is_left_out_with_its_reason() -> None:
    batch = replace(
        batch_of((2, 0), (2, 2), (5, 4), (2, 1), (2, 1), (0, 1)),
        mask_R=np.array([False, False, True, True, True, True, True, True, True]),
        values_N=np.array([0.0, 0, 0, np.nan, 0, 0]),
    )
    expected = (
        DropReason.EMPTY_RESPONSE,
        DropReason.FULLY_MASKED,
        DropReason.TOO_LONG,
        DropReason.NON_FINITE,
        None,
        DropReason.EMPTY_RESPONSE,
    )
    assert unusable(batch, context_length=8, vocabulary=1000) == expected
    assert unusable(batch, context_length=9, vocabulary=19)[2:5] == (None, DropReason.NON_FINITE, DropReason.NON_FINITE)
    usable = filter_trainable(batch, context_length=8, vocabulary=1000)
    assert usable.places.tolist() == [4]
    assert usable.dropped == expected
    assert usable.batch.tokens_T.tolist() == [18, 19, 20]


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("values_N", np.inf),
        ("scores_N", np.nan),
        ("temperature_N", 0.0),
        ("temperature_N", np.nan),
        ("weight_N", -0.5),
        ("weight_N", np.inf),
        ("behaviour_logprobs_R", np.nan),
        ("tokens_T", -1),
    ],
)
def test_one_wrong_number_costs_its_transition_alone(field: str, bad: float) -> None:
    batch = batch_of((1, 1), (1, 1), (1, 1))
    numbers = getattr(batch, field).copy()
    numbers[3 if field == "tokens_T" else 1] = bad
    found = unusable(replace(batch, **{field: numbers}), context_length=8, vocabulary=1000)
    assert found == (None, DropReason.NON_FINITE, None)


def test_what_was_recorded_for_a_forced_token_does_not_matter() -> None:
    batch = replace(
        batch_of((1, 2)), mask_R=np.array([False, True]), behaviour_logprobs_R=np.array([np.nan, -1], np.float32)
    )
    assert unusable(batch, context_length=8, vocabulary=1000) == (None,)


def test_a_subset_keeps_what_belongs_to_its_transitions() -> None:
    batch = batch_of((2, 3), (1, 2), (3, 1))
    part = subset(batch, np.array([2, 0]))
    assert part.tokens_T.tolist() == [8, 9, 10, 11, 0, 1, 2, 3, 4]
    assert part.behaviour_logprobs_R.tolist() == [-6, -1, -2, -3]
    assert part.offsets.tolist() == [0, 4, 9]
    assert part.values_N.tolist() == [2.5, 0.5]
    assert [key.call for key in part.keys] == ["c2", "c0"]


def test_rewards_of_calls_that_are_left_out_go_to_the_calls_before_them() -> None:
    batch = replace(batch_of((1, 1), (1, 0), (1, 1)), kind=CreditKind.REWARD)
    usable = filter_trainable(batch, context_length=8, vocabulary=1000)
    assert usable.batch.values_N.tolist() == [0.5 + 1.5, 2.5]
    returns = filter_trainable(replace(batch, kind=CreditKind.RETURN), context_length=8, vocabulary=1000)
    assert returns.batch.values_N.tolist() == [0.5, 2.5], "returns contain them already"
