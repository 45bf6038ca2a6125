"""Whatever is killed, and whenever: what was acknowledged is there, and every sample is trained on once."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from .fault_run import TinyRun
from .fault_storm import drawn_settings, storm

KILLS = 6
STORMS = int(os.environ.get("AGL_FAULT_STORMS", "1"))


@pytest.mark.storm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(STORMS))
def test_kills_at_random_moments_only_cost_time(tiny_run: Callable[..., TinyRun], seed: int, number: int) -> None:
    chance = random.Random(f"{seed}-{number}")
    run = tiny_run(**drawn_settings(chance))
    assert len(list(storm(run, chance, KILLS))) == KILLS
