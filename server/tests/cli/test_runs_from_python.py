"""Runs from Python: what was recorded as tables, also where an event loop runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agl_server
from agl_core.errors import ConfigError, TrainingError

from .conftest import ENDS


async def test_a_run_is_read_as_tables_in_a_notebooks_loop(run: Any) -> None:
    read = agl_server.Run("calc")
    rollouts, transitions = read.rollouts(), read.transitions()
    assert dict(zip(rollouts["rollout"], rollouts["terminal_reward"], strict=True)) == {
        f"s1-g0-{member}": ENDS[member][2] for member in ENDS
    }
    assert transitions["prompt_ids"].map(list).tolist()[:2] == [[1, 2, 3], [1, 2, 3, 4]]
    assert set(read.transitions(high=0.5)["rollout"]) == {"s1-g0-m1"}
    assert read.dataset()["credit"] == transitions["credit"].tolist()
    assert (read.verdict, len(read.metrics())) == (None, 0)


async def test_a_rollout_is_shown(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    agl_server.Run("calc").show("s1-g0-m0")
    assert "terminal reward: 1" in capsys.readouterr().out


async def test_where_a_loop_runs_training_is_awaited(run: Any) -> None:
    with pytest.raises(TrainingError, match=r"await agl_server\.train_async"):
        agl_server.train("train.toml")
    with pytest.raises(ConfigError, match="there is no such key"):
        await agl_server.train_async("train.toml", **{"train.stepps": 3})


def test_a_run_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="There are no runs"):
        agl_server.Run("clac")
