"""Whatever is killed, and whenever: what was acknowledged is there, and every sample is trained on once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from .fault_run import TinyRun
from .fault_storm import drawn_settings, storm

KILLS = 6


@pytest.mark.storm
@pytest.mark.timeout(900)
def test_kills_at_random_moments_only_cost_time(tiny_run: Callable[..., TinyRun], chance: random.Random) -> None:
    run = tiny_run(**drawn_settings(chance))
    assert len(list(storm(run, chance, KILLS))) == KILLS
