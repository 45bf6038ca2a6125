"""The simulated travellers: the same for the same seed, and bounded."""

from __future__ import annotations

from itertools import islice

import pytest
from users import NAMING_SHARE, Traveller, travellers


def crowd(seed: int, count: int = 2000, shift: int = 1000) -> list[Traveller]:
    return list(islice(travellers(seed, shift), count))


def test_wishes_shift_and_nothing_else_does() -> None:
    shifted, steady = crowd(0), crowd(0, shift=10_000)
    assert not any(each.wish.airline for each in [*shifted[:1000], *steady])
    assert sum(each.wish.airline is not None for each in shifted[1000:]) == pytest.approx(1000 * NAMING_SHARE, abs=50)
    for ours, theirs in zip(shifted, steady, strict=True):
        assert (ours.wish.city, ours.wish.day, ours.gives_feedback) == (
            theirs.wish.city,
            theirs.wish.day,
            theirs.gives_feedback,
        )
