"""Batches for the algorithms' tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from agl_algorithms.interface import Logprobs, Samples


@dataclass(frozen=True)
class Row:
    """One transition of a test batch."""

    group: int
    rollout: int
    value: float
    mask: tuple[bool, ...]


def make_samples(rows: Sequence[Row], behaviour_R: Tensor | None = None) -> Samples:
    lengths = torch.tensor([len(row.mask) for row in rows])
    turns: dict[int, int] = {}
    turn = []
    for row in rows:
        turn.append(turns.get(row.rollout, 0))
        turns[row.rollout] = turn[-1] + 1
    values = torch.tensor([row.value for row in rows], dtype=torch.float64)
    return Samples(
        transition_R=torch.repeat_interleave(torch.arange(len(rows)), lengths),
        mask_R=torch.tensor([m for row in rows for m in row.mask], dtype=torch.bool),
        behaviour_R=torch.zeros(int(lengths.sum()), dtype=torch.float64) if behaviour_R is None else behaviour_R,
        values_N=values,
        scores_N=values,
        group_N=torch.tensor([row.group for row in rows]),
        rollout_N=torch.tensor([row.rollout for row in rows]),
        turn_N=torch.tensor(turn),
    )


def make_logprobs(tokens: int, seed: int, spread: float = 0.3) -> Logprobs:
    """Random log-probabilities around each other; `current_R` is a leaf that wants a gradient."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> Tensor:
        return torch.randn(tokens, generator=generator, dtype=torch.float64) * scale

    old = -draw(1.0).abs() - 0.5
    return Logprobs(
        current_R=(old + draw(spread)).requires_grad_(),
        old_R=old,
        behaviour_R=old + draw(spread),
        reference_R=old + draw(spread),
    )


@pytest.fixture
def ragged() -> Samples:
    """Two groups of unequal rewards and one of equal ones, ragged in rollouts, turns and tokens, partly masked."""
    rows = [
        Row(0, 0, 1.0, (True, True, False)),
        Row(0, 0, 1.0, (True,)),
        Row(0, 1, 0.0, (True, True)),
        Row(0, 2, 0.5, (False, True, True, True)),
        Row(1, 3, 0.2, (True,) * 5),
        Row(1, 4, 0.9, (True, False)),
        Row(1, 4, 0.9, (True,)),
        Row(1, 4, 0.9, (False,)),
        Row(2, 5, 1.0, (True, True)),
        Row(2, 6, 1.0, (True,) * 3),
    ]
    tokens = sum(len(row.mask) for row in rows)
    return make_samples(rows, make_logprobs(tokens, seed=11).behaviour_R)
