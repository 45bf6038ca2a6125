"""Which waiting rows to prefill together, so that a shared prefix is computed once and little is padded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class PrefixScan:
    """Compares a prompt with those that were added before."""

    capacity: int
    _lengths: list[int] = field(default_factory=list)
    _tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))

    def add(self, tokens: Tokens) -> None:
        count = len(self._lengths)
        if count == len(self._tokens):
            grown = np.full((max(8, 2 * count), self.capacity), -1, np.int32)
            grown[:count, : self._tokens.shape[1]] = self._tokens
            self._tokens = grown
        self._tokens[count, : len(tokens)] = tokens
        self._tokens[count, len(tokens) :] = -1
        self._lengths.append(len(tokens))

    def longest(self, tokens: Tokens) -> int:
        """The length of the longest prefix that `tokens` shares with one of them."""
        count = len(self._lengths)
        if count == 0:
            return 0
        differs = self._tokens[:count, : len(tokens)] != tokens
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
            yield _one_pass([(count, row, start)], max_tokens)
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
                yield _one_pass(batch)
                batch = []
        batch.append(entry)
    if batch:
        yield _one_pass(batch)


def _one_pass(batch: Sequence[tuple[int, int, int]], limit: int | None = None) -> Pass:
    batch = sorted(batch, key=lambda entry: entry[1])
    counts, rows, starts = (np.array(column, np.int64) for column in zip(*batch, strict=True))
    return Pass(rows, starts, counts if limit is None else np.minimum(counts, limit), last=limit is None)
