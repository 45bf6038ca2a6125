"""A step that taught nothing says why, if that is for the user to mend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from scripted_training import Bench, make_bench

from agl_core.training.progress import Silent


class Said(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


async def said(bench: Bench) -> list[str]:
    """What a whole training has to say."""
    observer = Said()
    await replace(bench.trainer, observer=observer).train()
    return observer.lines


async def test_a_run_that_learns_says_nothing(tmp_path: Path) -> None:
    assert await said(make_bench(tmp_path)) == []


async def test_chosen_agents_that_made_no_call(tmp_path: Path) -> None:
    lines = await said(make_bench(tmp_path, agents=["writer", "edit*"], steps=2))

    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2"]
    assert "train.agents = ['writer', 'edit*'] names none of the agents that made calls: solver (8 calls)" in lines[0]


@pytest.mark.parametrize("judges", [True, False])
async def test_rollouts_that_nobody_rewarded(tmp_path: Path, judges: bool) -> None:
    bench = make_bench(tmp_path, steps=1)
    bench.collector.judges = judges
    bench.collector.reward = lambda rollout: 0.0

    lines = await said(bench)

    if judges:  # A reward of 0 is a reward.
        assert lines == []
    else:
        [line] = lines
        assert "no rule in [rewards] had anything to say of 4 rollouts" in line
