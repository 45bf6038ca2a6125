"""Which waiting rows to prefill together, so that a shared prefix is computed once and little is padded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agl_core.types import Tokens

MIN_SHARED = 16
"""A row waits one pass for another of the same pass if that spares it more tokens than this."""
PAD_SHARE = 0.25
"""Rows are computed together while the shortest misses at most this share of the longest …"""
PAD_TOKENS = 16
"""… or this many tokens."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A stretch of tokens to compute for several rows at once."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    last: bool
    """Whether it ends at each row's last token, whose logits are wanted."""


class PrefixScan:
    """Compares a prompt of at most `capacity` tokens with those that were added before."""

    def __init__(self, capacity: int) -> None:
        self._count = 0
        self._tokens: NDArray[np.int32] = np.full((8, capacity), -1, np.int32)

    def add(self, tokens: Tokens) -> None:
        if self._count == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.full_like(self._tokens, -1)])
        self._tokens[self._count, : len(tokens)] = tokens
        self._count += 1

    def longest(self, tokens: Tokens) -> int:
        """The length of the longest prefix that `tokens` shares with one of them."""
        if self._count == 0:
            return 0
        differs = self._tokens[: self._count, : len(tokens)] != tokens
        return int(np.where(differs.any(1), differs.argmax(1), len(tokens)).max())


def passes(
    rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], *, max_tokens: int, alone: bool
) -> Iterable[Pass]:
    """Cut the prefill of `rows` into passes of at most `max_tokens` inputs, pads included.

    A row of more than `max_tokens` is computed in several passes by itself. `alone` computes each row by itself.
    """
    short: list[tuple[int, int, int]] = []
    for row, start, count in zip(rows, starts, counts, strict=True):
        while count > max_tokens:
            yield _one_pass([(max_tokens, row, start)], last=False)
            start, count = start + max_tokens, count - max_tokens
        short.append((count, row, start))
    if not alone:
        short.sort(reverse=True)
    batch: list[tuple[int, int, int]] = []
    for entry in short:
        if batch:
            longest = batch[0][0]
            full = (len(batch) + 1) * longest > max_tokens
            if alone or full or longest - entry[0] > max(PAD_TOKENS, PAD_SHARE * longest):
                yield _one_pass(batch, last=True)
                batch = []
        batch.append(entry)
    if batch:
        yield _one_pass(batch, last=True)


def _one_pass(batch: Sequence[tuple[int, int, int]], *, last: bool) -> Pass:
    in_order = sorted(batch, key=lambda entry: entry[1])
    counts, rows, starts = (np.array(column, np.int64) for column in zip(*in_order, strict=True))
    return Pass(rows, starts, counts, last)
