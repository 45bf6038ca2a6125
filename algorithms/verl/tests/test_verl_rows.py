"""Transitions as veRL's rows, and how they are dealt out to optimizer steps and workers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from agl_core.testing.engines import Row, batch_of
from agl_core.types import Batch
from agl_verl.rows import gather, lay_out, place_of, row_of, spread


def recorded(*lengths: tuple[int, int]) -> Batch:
    """Transitions with these prompt and response lengths, all tokens different."""
    tokens = itertools.count()

    def take(count: int) -> list[int]:
        return list(itertools.islice(tokens, count))

    rows = [Row(take(prompt), take(response), [], place + 0.5) for place, (prompt, response) in enumerate(lengths)]
    batch = batch_of(rows)
    return replace(batch, behaviour_logprobs_R=-np.arange(1, len(batch.mask_R) + 1, dtype=np.float32))


def test_a_row_is_what_was_recorded() -> None:
    batch = replace(
        recorded((2, 3), (4, 1)),
        rollout_N=np.array([4, 7]),
        group_N=np.array([2, 3]),
        mask_R=np.array([True, False, True, True]),
    )
    row = row_of(batch, 0, step=9)
    assert row.fields["prompts"].tolist() == [0, 1]
    assert row.fields["responses"].tolist() == [2, 3, 4]
    assert row.fields["input_ids"].tolist() == [0, 1, 2, 3, 4]
    assert row.fields["response_mask"].tolist() == [1, 0, 1]
    assert row.fields["rollout_log_probs"].tolist() == [-1, 0, -3], "what is recorded for a forced token means nothing"
    assert row.fields["rm_scores"].tolist() == [0, 0, 0.5], "the credited value, at the last token"
    assert (row.key, row.fields["uid"], place_of(row.key)) == ("u9g2_4_0", "u9g2", 0)
    assert row.tag == {"seq_len": 5}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_what_is_spread_over_rows_is_gathered_again(responses: list[int], random) -> None:
    batch = recorded(*((1, response) for response in responses))
    values_R = torch.arange(1.0, sum(responses) + 1)
    keys = [row_of(batch, i, 3).key for i in range(len(batch))] + ["pad0123_0_0", "pad0123_1_0"]
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
