"""The two scripts that compare runs: by hand-made numbers, and on a real run of a few rollouts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import compare
import pytest
from oracle import Effect
from where_credit_went import episodes, of_run, pulls

from agl_core.config.load import load
from agl_core.types import Episode, TrainingRecord

EXAMPLE = Path(__file__).parents[1]
NEARER, LOST, NONE = Effect.NEARER, Effect.OUT_OF_REACH, Effect.NONE


def used(advantage: float | None, weight: float, dropped: str | None = None) -> TrainingRecord:
    return TrainingRecord("r", 0, "c", 0, step=1, credit=0.0, advantage=advantage, weight=weight, dropped=dropped)


def test_pulls_are_shared_by_advantage_and_weight() -> None:
    judged = [
        (NEARER, used(+2.0, 0.5)),  # right: 1
        (LOST, used(-1.0, 0.5)),  # right: 0.5
        (NEARER, used(-1.0, 0.25)),  # wrong: 0.25
        (LOST, used(+0.5, 0.5)),  # wrong: 0.25
        (NONE, used(-4.0, 0.5)),  # idle: 2
        (NONE, used(0.0, 0.5)),
        (NEARER, used(None, 0.0, "no_logprobs")),
    ]
    found = pulls(judged)
    assert (found.calls, found.mattered) == (6, pytest.approx(4 / 6))
    assert (found.right, found.wrong, found.idle) == pytest.approx((1.5 / 4, 0.5 / 4, 2 / 4))


@pytest.mark.storm
def test_a_run_is_recorded_so_that_both_scripts_can_read_it(tmp_path: Path) -> None:
    small = {
        "runs": tmp_path,
        "credit.name": "stepwise",
        "train.steps": 2,
        "train.groups_per_step": 2,
        "train.group_size": 8,
        "eval.tasks": 6,
    }
    arguments = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    agl = Path(sys.executable).with_name("agl")
    result = subprocess.run([agl, "train", EXAMPLE / "train.toml", *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "trip"
    trained, evaluated = compare.lines(run, "train"), compare.lines(run, "eval")
    assert [line["calls/prefix_broken"] for line in trained] == [0.0, 0.0]
    assert all(0 <= line["reward/memory_first"] <= 1 for line in trained)
    assert len(evaluated) == 2
    assert [row[:2] for row in compare.rows(run)] == [("trip", "memory first"), ("trip", "reward")]
    both, first = (asyncio.run(of_run(run, steps)) for steps in (None, 1))
    assert first.calls < both.calls == sum(line["transitions/kept"] for line in trained)
    assert both.right + both.wrong + both.idle == pytest.approx(1)
    meet_in_states(asyncio.run(episodes_of(run)))


async def episodes_of(run: Path) -> list[Episode]:
    async with load(run / "config.toml").store.build(run, True) as store:
        return await episodes(store)


def meet_in_states(found: list[Episode]) -> None:
    """Members of a group stand before the same tokens at first, and again if they said the same."""
    first, second = {}, {}
    met = 0
    for episode in found:
        opening, *later = episode.transitions
        assert first.setdefault(episode.group, bytes(opening.prompt_ids)) == bytes(opening.prompt_ids)
        for transition in later[:1]:
            state = episode.group, bytes(opening.response_ids)
            met += state in second
            assert second.setdefault(state, bytes(transition.prompt_ids)) == bytes(transition.prompt_ids)
    assert len(first) == 4
    assert met
