"""Transitions that begin with the same tokens, laid out as a tree: what they share is computed once, exactly.

Turns of one rollout continue each other and the rollouts of a group answer the same prompt, so most tokens of a batch
are repeated. A tree holds each once, in depth-first order. A token sees the tokens on the way from the root to
itself, at its own depth as position: exactly what it would see in its transition alone, so loss and gradient are the
same (the layout of Tree Training, arXiv 2511.00413).

Where a tree branches, each branch attends along its own path (`agl_torch.models.attention`). That costs an operation
for each branch, so short prefixes are not shared by small models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from agl_core.types import Batch
from agl_torch.models.attention import Branch

SEEN, CAUSAL = 2.3, 1.0
"""What attention takes, measured on a CPU, against the operations of all pairs at the speed of the matrices: of a
branch's tokens with those before it, and among themselves, where causal attention skips half of the pairs."""
COPYING, BRANCHING = 13, 80_000
"""What copying the keys and values of a branch's token takes, and what a branch costs by itself, measured on a CPU, in
tokens of a model of hidden size 1. A larger model computes fewer in the same time: hidden² fewer, but copies hidden
times as much."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The tokens of n transitions, shared prefixes once. L counts its tokens."""

    transitions_n: NDArray[np.int64]
    """[n] places in the batch."""
    tokens_L: NDArray[np.int64]
    depth_L: NDArray[np.int64]
    """[L] the position of each token in its transition."""
    branches: tuple[Branch, ...]
    """They cover the tokens in order; a single path is one branch."""
    paths_n: tuple[NDArray[np.int64], ...]
    """n × [its length] where the tokens of each transition are."""

    def __len__(self) -> int:
        return len(self.tokens_L)

    @property
    def is_path(self) -> bool:
        """Whether each token sees all tokens before it, as in a transition alone."""
        return len(self.branches) == 1


def plan_trees(
    batch: Batch, chosen: NDArray[np.int64], *, token_budget: int, response_budget: int, hidden_size: int | None
) -> list[NDArray[np.int64]]:
    """Which of the `chosen` transitions make one tree, each in the order of its paths.

    A tree has at most `token_budget` tokens and its transitions at most `response_budget` response tokens together,
    unless it is one transition. `hidden_size` is the model's: from it follows what attention costs. None: no tree may
    branch.

    Transitions that continue each other are a chain, which costs what its last one does. A chain branches off the tree
    before it if that costs less than computing the whole chain apart.
    """
    trees: list[NDArray[np.int64]] = []
    lengths, responses = np.diff(batch.offsets), batch.response_lengths_N
    order, shared = _by_prefix(batch, chosen)
    continues = [place > 0 and shared[place] == lengths[order[place - 1]] for place in range(len(order))]
    chain_lengths = lengths[order]
    for place in range(len(order) - 2, -1, -1):
        if continues[place + 1]:
            chain_lengths[place] = chain_lengths[place + 1]
    start = tokens = response_tokens = 0
    for place, row in enumerate(order):
        new = int(lengths[row]) - shared[place]
        if place > start and (
            tokens + new > token_budget
            or response_tokens + int(responses[row]) > response_budget
            or not (continues[place] or _pays(shared[place], int(chain_lengths[place]), hidden_size))
        ):
            trees.append(order[start:place])
            start, tokens, response_tokens = place, 0, 0
        tokens += new if place > start else int(lengths[row])
        response_tokens += int(responses[row])
    if len(order):
        trees.append(order[start:])
    return trees


def grow(batch: Batch, transitions: NDArray[np.int64]) -> Tree:
    """The tree of these transitions, which must be in the order that `plan_trees` gave them."""
    tokens: list[NDArray[np.int32]] = []
    depths: list[NDArray[np.int64]] = []
    paths: list[NDArray[np.int64]] = []
    branches: list[Branch] = []
    size, path, before = 0, np.zeros(0, np.int64), np.zeros(0, np.int32)
    for row in transitions:
        ids = _ids(batch, int(row))
        same = _shared(before, ids)
        end = size + len(ids) - same
        if branches and same == len(before):
            branches[-1] = replace(branches[-1], end=end)
        elif same < len(ids):
            branches.append(Branch(size, end, _runs(path[:same])))
        path = np.concatenate([path[:same], np.arange(size, end)])
        tokens.append(ids[same:])
        depths.append(np.arange(same, len(ids)))
        paths.append(path)
        size, before = end, ids
    return Tree(
        transitions_n=transitions,
        tokens_L=np.concatenate(tokens).astype(np.int64),
        depth_L=np.concatenate(depths),
        branches=tuple(branches),
        paths_n=tuple(paths),
    )


def _runs(places: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Ascending places as runs [start, end)."""
    if not len(places):
        return ()
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(places, cuts))


def _by_prefix(batch: Batch, chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], Sequence[int]]:
    """The chosen transitions in the order of their tokens, and how many tokens each shares with the one before.

    In this order no transition shares more with any earlier one than with the last.
    """
    keys = [_ids(batch, int(row)).astype(">u4").tobytes() for row in chosen]  # Big-endian bytes compare as the ids do.
    order = chosen[np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)]
    ids = [_ids(batch, int(row)) for row in order]
    return order, [0] + [_shared(one, other) for one, other in pairwise(ids)]


def _ids(batch: Batch, row: int) -> NDArray[np.int32]:
    return batch.tokens_T[batch.offsets[row] : batch.offsets[row + 1]]


def _shared(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _pays(shared: int, length: int, hidden_size: int | None) -> bool:
    """Whether a path of `length` tokens is cheaper as a branch that shares its first ones than apart.

    The unit is what a token costs outside attention. A layer's matrices take about 24 · hidden² operations a token,
    attention 4 · hidden a pair of tokens.
    """
    if hidden_size is None or shared == 0:
        return False
    pair, new = 1 / (6 * hidden_size), length - shared
    attention = pair * (SEEN * new * shared + CAUSAL * new**2)
    together = new * (1 + COPYING / hidden_size) + attention + BRANCHING / hidden_size**2
    return together < length + CAUSAL * pair * length**2
