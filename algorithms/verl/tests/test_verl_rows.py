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
from agl_verl.rows import gather, lay_out, row_of, spread


def recorded(*lengths: tuple[int, int]) -> Batch:
    """Transitions with these prompt and response lengths, all tokens different."""
    tokens = itertools.count()

    def take(count: int) -> list[int]:
        return list(itertools.islice(tokens, count))

    rows = [Row(take(prompt), take(response), [], n + 0.5) for n, (prompt, response) in enumerate(lengths)]
    batch = batch_of(rows)
    return replace(batch, behaviour_logprobs_R=-np.arange(1, len(batch.mask_R) + 1, dtype=np.float32))


def test_a_row_is_what_was_recorded() -> None:
    batch = replace(
        recorded((2, 3), (4, 1)),
        rollout_N=np.array([4, 7]),
        group_N=np.array([2, 3]),
        mask_R=np.array([True, False, True, True]),
    )
    row = row_of(batch, np.array([0]))
    assert row["prompts"].tolist() == [0, 1]
    assert row["responses"].tolist() == [2, 3, 4]
    assert row["input_ids"].tolist() == [0, 1, 2, 3, 4]
    assert row["response_mask"].tolist() == [1, 0, 1]
    assert row["rollout_log_probs"].tolist() == [-1, 0, -3], "what is recorded for a forced token means nothing"


def test_calls_that_continue_each_other_are_one_row() -> None:
    calls = [Row([1], [2, 3], [-1, -2], 0.5), Row([1, 2, 3, 4, 5], [6], [-3], 1.5)]
    batch = replace(batch_of(calls), mask_R=np.array([True, False, True]), turn_N=np.array([0, 1]))
    row = row_of(batch, np.array([0, 1]))
    assert row["prompts"].tolist() == [1]
    assert row["responses"].tolist() == [2, 3, 4, 5, 6]
    assert row["input_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert row["response_mask"].tolist() == [1, 0, 0, 0, 1]
    assert row["rollout_log_probs"].tolist() == [-1, 0, 0, 0, -3]
    assert spread(batch, torch.tensor([0, 0, 1]), [np.array([0, 1])], between=-1)[0].tolist() == [0, 0, -1, -1, 1]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=12), st.data())
def test_what_is_spread_over_rows_is_gathered_again(calls: list[tuple[int, int]], data: st.DataObject) -> None:
    """Calls of one conversation, each with some news before its response; it goes on in one row or in the next."""
    rows, history = list[Row](), [0]
    for news, response in calls:
        history = history + [1] * news
        rows.append(Row(history, [2] * response, [-1.0] * response, 0.0))
        history = history + [2] * response
    batch = batch_of(rows)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rows)))))
    chains: list[np.ndarray | None] = [chain for chain in np.split(np.arange(len(rows)), cuts) if len(chain)]
    chains = data.draw(st.permutations([*chains, None, None]))
    values_R = torch.arange(1.0, len(batch.mask_R) + 1)
    spread_rows = spread(batch, values_R, chains)
    assert gather(batch, spread_rows, chains).tolist() == values_R.tolist()
    pads = [row for chain, row in zip(chains, spread_rows, strict=True) if chain is None]
    assert [row.tolist() for row in pads] == [[0.0], [0.0]], "a pad row weighs nothing"
    for chain, row in zip(chains, spread_rows, strict=True):
        if chain is not None:
            fields = row_of(batch, chain)
            assert (row > 0).tolist() == (fields["responses"] == 2).tolist(), "values are at the responses"
            assert {len(fields[name]) for name in ("response_mask", "rollout_log_probs")} == {len(row)}


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
