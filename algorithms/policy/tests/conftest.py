"""Batches for the algorithms' tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from agl_algorithms.policy_gradient import Logprobs, Samples


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
    return Samples(
        transition_R=torch.repeat_interleave(torch.arange(len(rows)), lengths),
        mask_R=torch.tensor([m for row in rows for m in row.mask], dtype=torch.bool),
        behaviour_R=torch.zeros(int(lengths.sum()), dtype=torch.float64) if behaviour_R is None else behaviour_R,
        values_N=torch.tensor([row.value for row in rows], dtype=torch.float64),
        group_N=torch.tensor([row.group for row in rows]),
        rollout_N=torch.tensor([row.rollout for row in rows]),
        turn_N=torch.tensor(turn),
    )


def make_logprobs(tokens: int, seed: int, spread: float = 0.3) -> Logprobs:
    """Random log-probabilities around each other; `current_R` is a leaf that wants a gradient, entropies follow it."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> Tensor:
        return torch.randn(tokens, generator=generator, dtype=torch.float64) * scale

    old = -draw(1.0).abs() - 0.5
    current = (old + draw(spread)).requires_grad_()
    return Logprobs(
        current_R=current,
        old_R=old,
        behaviour_R=old + draw(spread),
        reference_R=old + draw(spread),
        entropy_R=-current * current.exp(),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Row], int]:
    rows: list[Row] = []
    rollout = 0
    for group in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 4))):
            value = draw(st.sampled_from([0.0, 0.25, 1.0, -2.0]))
            for _ in range(draw(st.integers(1, 3))):
                credit = value + draw(st.sampled_from([0.0, 0.0, 0.5]))
                mask = draw(st.lists(st.booleans(), min_size=1, max_size=4))
                rows.append(Row(group, rollout, credit, tuple(mask)))
            rollout += 1
    return rows, draw(st.integers(0, 1000))


def build(rows: list[Row], seed: int) -> tuple[Samples, Logprobs]:
    logprobs = make_logprobs(sum(len(row.mask) for row in rows), seed)
    return make_samples(rows, logprobs.behaviour_R), logprobs


def select(samples: Samples, logprobs: Logprobs, order: list[int]) -> tuple[Samples, Logprobs, Tensor]:
    """The transitions of `order`, renumbered, and which response tokens they are."""
    tokens = torch.cat([(samples.transition_R == i).nonzero()[:, 0] for i in order])
    lengths = torch.tensor([int((samples.transition_R == i).sum()) for i in order])
    picked = Samples(
        torch.repeat_interleave(torch.arange(len(order)), lengths),
        samples.mask_R[tokens],
        samples.behaviour_R[tokens],
        *(column[order] for column in (samples.values_N, samples.group_N, samples.rollout_N, samples.turn_N)),
    )
    columns = ("current_R", "old_R", "behaviour_R", "reference_R", "entropy_R")
    return picked, Logprobs(**{column: getattr(logprobs, column)[tokens] for column in columns}), tokens


def critic_values(samples: Samples) -> Tensor:
    """[R] what a critic might say: a number by token and prompt, whatever the order of transitions."""
    lengths = torch.bincount(samples.transition_R, minlength=samples.values_N.numel())
    place_R = torch.arange(samples.mask_R.numel()) - (lengths.cumsum(0) - lengths)[samples.transition_R]
    prompt_N = (samples.rollout_N * 7 + samples.turn_N * 3) % 5
    return torch.sin(place_R.double() + prompt_N[samples.transition_R].double())


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
