"""Transitions that begin with the same tokens, laid out as a tree: what they share is computed once, exactly.

Turns of one rollout continue each other and the rollouts of a group answer the same prompt, so most tokens of a batch
are repeated. A tree holds each once, in depth-first order. A token sees the tokens on the way from the root to
itself, at its own depth as position: exactly what it would see in its transition alone, so loss and gradient are the
same (the layout of Tree Training, arXiv 2511.00413).

Where a tree branches, attention is computed over the whole of it and masked, which is dear for large trees: one is cut
where sharing more would cost more than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from agl_core.types import Batch

LARGEST_MASKED = 8192
"""Tokens of a tree with branches: its mask has the square of that many entries."""

MASKED, CAUSAL = 1.5, 1.0
"""What attention takes, measured on a CPU, against the operations of all pairs at the speed of the matrices. Causal
attention skips half of the pairs, at a lower speed."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The tokens of n transitions, shared prefixes once. L counts its tokens."""

    transitions_n: NDArray[np.int64]
    """[n] places in the batch."""
    tokens_L: NDArray[np.int64]
    depth_L: NDArray[np.int64]
    """[L] the position of each token in its transition."""
    last_L: NDArray[np.int64]
    """[L] the last token below each: token i sees token j if j <= i <= last_L[j]."""
    paths_n: tuple[NDArray[np.int64], ...]
    """n × [its length] where the tokens of each transition are."""

    def __len__(self) -> int:
        return len(self.tokens_L)

    @property
    def branches(self) -> bool:
        """Whether some token must not see an earlier one; a single path needs no mask."""
        return bool((self.last_L != len(self) - 1).any())


def plan_trees(
    batch: Batch, chosen: NDArray[np.int64], *, token_budget: int, response_budget: int, hidden_size: int
) -> list[NDArray[np.int64]]:
    """Which of the `chosen` transitions make one tree, each in the order of its paths.

    A tree has at most `token_budget` tokens and its transitions at most `response_budget` response tokens together,
    unless it is one transition. `hidden_size` is the model's: from it follows what attention costs.

    Transitions that continue each other are a chain, which costs what its last one does. A chain joins the tree before
    it if the tree with that branch costs less than both apart.
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
    branches = False
    for place, row in enumerate(order):
        new, chain = int(lengths[row]) - shared[place], int(chain_lengths[place])
        together = _cost(tokens + chain - shared[place], hidden_size, MASKED)
        apart = _cost(tokens, hidden_size, MASKED if branches else CAUSAL) + _cost(chain, hidden_size, CAUSAL)
        if place > start and (
            tokens + new > min(token_budget, LARGEST_MASKED)
            or response_tokens + int(responses[row]) > response_budget
            or (not continues[place] and together > apart)
        ):
            trees.append(order[start:place])
            start, tokens, response_tokens, branches = place, 0, 0, False
        branches |= place > start and not continues[place]
        tokens += new if place > start else int(lengths[row])
        response_tokens += int(responses[row])
    if len(order):
        trees.append(order[start:])
    return trees


def grow(batch: Batch, transitions: NDArray[np.int64]) -> Tree:
    """The tree of these transitions, which must be in the order that `plan_trees` gave them."""
    tokens: list[NDArray[np.int32]] = []
    depths: list[NDArray[np.int64]] = []
    last = np.zeros(int(np.diff(batch.offsets)[transitions].sum()), np.int64)
    paths: list[NDArray[np.int64]] = []
    size, path, before = 0, np.zeros(0, np.int64), np.zeros(0, np.int32)
    for row in transitions:
        ids = _ids(batch, int(row))
        same = _shared(before, ids)
        last[path[same:]] = size - 1
        path = np.concatenate([path[:same], np.arange(size, size + len(ids) - same)])
        tokens.append(ids[same:])
        depths.append(np.arange(same, len(ids)))
        size += len(ids) - same
        paths.append(path)
        before = ids
    last[path] = size - 1
    return Tree(
        transitions_n=transitions,
        tokens_L=np.concatenate(tokens).astype(np.int64),
        depth_L=np.concatenate(depths),
        last_L=last[:size],
        paths_n=tuple(paths),
    )


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


def _cost(tokens: int, hidden_size: int, attention: float) -> float:
    """Of a pass over a tree, in what a token costs outside attention.

    A layer's matrices take about 24 · hidden² operations a token, attention 4 · hidden a pair of tokens.
    """
    return tokens + attention * tokens**2 / (6 * hidden_size)
