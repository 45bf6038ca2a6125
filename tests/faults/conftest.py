"""Runs that are struck at random moments."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite(*(f"{__package__}.{name}" for name in ("fault_checks", "fault_run")))

from .fault_run import TinyRun  # noqa: E402


@pytest.fixture
def seed() -> int:
    """Of everything that a test draws; a failure shows it."""
    chosen = int(os.environ.get("AGL_FAULT_SEED") or random.SystemRandom().randrange(10**6))
    print(f"AGL_FAULT_SEED={chosen}")
    return chosen


@pytest.fixture
def chance(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture
def tiny_run(tmp_path: Path) -> Iterator[Callable[..., TinyRun]]:
    """Makes a run, see `TinyRun`; nothing of it is left afterwards."""
    runs: list[TinyRun] = []

    def make(**arguments: Any) -> TinyRun:
        runs.append(TinyRun(tmp_path / f"run-{len(runs)}", **arguments))
        return runs[-1]

    yield make
    for run in runs:
        run.stop()
