"""Transitions as veRL's rows, and how they are dealt out to optimizer steps and workers."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from agl_core.types import Batch, CreditKind, TransitionKey
from agl_verl.rows import gather, lay_out, place_of, rows_of, spread


def batch_of(lengths: list[tuple[int, int]], rollouts: list[int] | None = None, **changed: object) -> Batch:
    """Transitions with these prompt and response lengths, all tokens different."""
    count = len(lengths)
    rollouts = list(range(count)) if rollouts is None else rollouts
    total, responses = sum(map(sum, lengths)), sum(response for _, response in lengths)
    fields: dict[str, object] = {
        "tokens_T": np.arange(total, dtype=np.int32),
        "offsets": np.cumsum([0, *(prompt + response for prompt, response in lengths)]).astype(np.int64),
        "prompt_lengths_N": np.array([prompt for prompt, _ in lengths], np.int64),
        "response_offsets": np.cumsum([0, *(response for _, response in lengths)]).astype(np.int64),
        "behaviour_logprobs_R": -np.arange(1, responses + 1, dtype=np.float32),
        "mask_R": np.ones(responses, np.bool_),
        "temperature_N": np.ones(count, np.float32),
        "values_N": np.arange(count) + 0.5,
        "kind": CreditKind.RETURN,
        "group_N": np.array(rollouts, np.int64) // 2,
        "rollout_N": np.array(rollouts, np.int64),
        "turn_N": np.zeros(count, np.int64),
        "version_N": np.arange(count, dtype=np.int64),
        "keys": tuple(TransitionKey("r", 0, f"c{i}", 0) for i in range(count)),
        **changed,
    }
    return Batch(**fields)  # type: ignore[arg-type]


def test_a_row_is_what_was_recorded() -> None:
    batch = batch_of([(2, 3), (4, 1)], rollouts=[4, 7], mask_R=np.array([True, False, True, True]))
    row = rows_of(batch, np.array([0]), step=9)[0]
    assert row.fields["prompts"].tolist() == [0, 1]
    assert row.fields["responses"].tolist() == [2, 3, 4]
    assert row.fields["input_ids"].tolist() == [0, 1, 2, 3, 4]
    assert row.fields["response_mask"].tolist() == [1, 0, 1]
    assert row.fields["rollout_log_probs"].tolist() == [-1, 0, -3], "what is recorded for a forced token means nothing"
    assert row.fields["rm_scores"].tolist() == [0, 0, 0.5], "the credited value, at the last token"
    assert (row.key, row.group, place_of(row.key)) == ("u9g2_4_0", "u9g2", 0)
    assert row.tag["seq_len"] == 5
    assert (row.tag["prompt_len"], row.tag["response_len"], row.tag["min_global_steps"]) == (2, 3, 0)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_what_is_spread_over_rows_is_gathered_again(responses: list[int], random) -> None:
    batch = batch_of([(1, response) for response in responses])
    values_R = torch.arange(1.0, sum(responses) + 1)
    keys = [row.key for row in rows_of(batch, np.arange(len(batch)), 3)] + ["pad0123_0_0", "pad0123_1_0"]
    random.shuffle(keys)
    rows = spread(batch, values_R, keys)
    assert gather(batch, rows, keys).tolist() == values_R.tolist()
    pads = [row for key, row in zip(keys, rows, strict=True) if place_of(key) is None]
    assert [row.tolist() for row in pads] == [[0.0], [0.0]], "a pad row weighs nothing"


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 4),
)
def test_every_worker_has_every_step_and_every_row_is_dealt_out_once(sizes: list[int], workers: int) -> None:
    ends = np.cumsum([0, *sizes])
    steps = [np.arange(start, end) for start, end in itertools.pairwise(ends)]

    def divide(rows: list[int], count: int) -> list[list[int]]:
        return [rows[worker::count] for worker in range(count)]

    order = lay_out(steps, workers, divide)
    assert sorted(order) == list(range(len(order)))
    assert len(order) % (workers * len(steps)) == 0
    per_step = len(order) // len(steps) // workers
    assert per_step == -(-max(sizes) // workers), "no more pads than it takes"
    shares_of_workers = np.array(order).reshape(workers, len(steps), per_step)
    for number, step in enumerate(steps):
        dealt = set(shares_of_workers[:, number].ravel().tolist())
        assert set(step.tolist()) <= dealt
        assert all(row >= ends[-1] for row in dealt - set(step.tolist())), "what is added are pads"
