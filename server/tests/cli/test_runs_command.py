"""`agl runs`: what it lists, takes away and leaves; looking at a run runs no code of it; runs read from Python."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import sys
from pathlib import Path
from typing import Any

import pytest
from agl_command import Agl

import agl_server
from agl_core.errors import ConfigError, StoreError, TrainingError
from agl_core.testing import episodes as make
from agl_core.types import Mode, RolloutState
from agl_server.store.sqlite import SqliteStore
from agl_server.training.checkpoints import Checkpoints, RunState

from .conftest import ENDS


@pytest.fixture
def trained(run: Any) -> Any:
    """Three steps with rollouts, checkpoints and metrics; the second checkpoint is the best."""
    run.put(*(record for step in (2, 3) for member in ("m0", "m1") for record in run.trained(step, member)))
    folder, checkpoints = run.store.parent, Checkpoints(run.store.parent / "checkpoints", keep=3)
    evaluations: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = [{"step": 0, "kind": "eval", "eval/greedy/reward/mean": 0.1}]
    for step, reward in enumerate((0.2, 0.9, 0.4), 1):
        lines.append({"step": step, "kind": "train", "reward/mean": 0.3})
        lines.append({"step": step, "kind": "eval", "easy/greedy/reward/mean": 1.0, "eval/greedy/reward/mean": reward})
        evaluations.append({"step": step, "set": "eval", "mode": "greedy", "reward": reward})
        part = checkpoints.begin(step)
        (part / "weights").write_bytes(bytes(1000))
        checkpoints.commit(part, RunState(step=step, evaluations=list(evaluations)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "ki')
    (folder / "summary.json").write_text("{}")
    return run


def listed(run: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(run.agl("runs", "list", "--json").stdout)
    return rows


def test_runs_are_listed_with_what_became_of_them(trained: Any) -> None:
    run = trained
    run.write("runs/calc/config.toml", folder=str(run.folder), train={"steps": 3})
    (run.folder / "runs" / "caught").mkdir()
    (run.folder / "runs" / "caught" / "config.toml").write_text("[capture]\n")
    by_name = {Path(row["folder"]).name: row for row in listed(run)}
    calc = by_name["calc"]
    assert (calc["state"], calc["steps"], calc["of_steps"]) == ("finished", 3, 3)
    assert (calc["reward_before"], calc["reward_after"]) == (0.1, 0.4)
    assert calc["size"] == sum(file.stat().st_size for file in run.store.parent.rglob("*") if file.is_file())
    assert (by_name["caught"]["state"], by_name["caught"]["of_steps"]) == ("capture", None)
    run.write("runs/calc/config.toml", folder=str(run.folder), train={"steps": 4})
    assert {row["state"] for row in listed(run)} == {"stopped", "capture"}
    (run.store.parent / "summary.json").unlink()
    assert {row["state"] for row in listed(run)} == {"failed", "capture"}, "what died wrote none"
    table = run.agl("runs", "list").stdout
    assert "runs/calc" in table
    assert "3/4" in table


def test_pruned_runs_are_smaller(trained: Any) -> None:
    run = trained
    whole = run.agl("show", "s3-g0-m0").stdout
    before = listed(run)[0]["size"]
    waits = make.rollout("waits", step=1)
    used = make.rollout("used", step=1, mode=Mode.USE, state=RolloutState.DONE)
    run.put(waits, used)
    pruned = json.loads(run.agl("runs", "prune", "calc", "--steps", "1", "--checkpoints", "1", "--json").stdout)
    assert [(entry["rollouts"], entry["up_to_step"]) for entry in pruned] == [(5, 2)]
    assert [Path(checkpoint).name for checkpoint in pruned[0]["checkpoints"]] == ["step-000001"]
    assert [path.name for path in Checkpoints(run.store.parent / "checkpoints", 1).all()] == [
        "step-000002",
        "step-000003",
    ]
    assert listed(run)[0]["size"] < before
    assert run.agl("show", "s3-g0-m0").stdout == whole
    left = {rollout["id"]: rollout["step"] for rollout in json.loads(run.agl("rollouts", "calc", "--json").stdout)}
    assert {id for id, step in left.items() if step <= 2} == {"waits", "used"}
    nothing = json.loads(run.agl("runs", "prune", "calc", "--steps", "1", "--json").stdout)
    assert (nothing[0]["rollouts"], nothing[0]["checkpoints"]) == (0, [])


@pytest.mark.parametrize("store", [{}, {"store": {"name": "sqlite", "sqlite": {}}}])
def test_a_run_with_a_setting_that_is_no_more_is_read(run: Any, store: Any) -> None:
    run.write("runs/calc/config.toml", folder=str(run.folder), train={"gone": 1}, **store)
    for command in (["rollouts", "calc"], ["export", "calc", "--to=episodes", "--out=out"]):
        assert run.agl(*command).exit_code == 0
    assert (run.folder / "out").is_file()


def test_a_run_is_removed_once_that_is_confirmed(trained: Any) -> None:
    run = trained
    run.write("runs/calc/config.toml", folder=str(run.folder), train={"steps": 3})
    folder = run.store.parent
    (folder.parent / "notes").mkdir()
    (folder.parent / "notes" / "config.toml").write_text("mine = true\n")

    refused = run.agl("runs", "rm", "calc")  # Nobody answers.
    assert refused.exit_code == 1
    assert "Remove runs/calc (finished, 3 steps" in refused.output
    assert run.store.exists()
    assert isinstance(run.agl("runs", "rm", "notes", "--yes").exception, ConfigError)
    assert (folder.parent / "notes").exists(), "it is no run"

    assert run.agl("runs", "rm", "calc", "--yes").exit_code == 0
    assert not folder.exists()
    assert listed(run)[0]["folder"].endswith("notes")


def test_a_run_that_is_served_is_left_alone(trained: Any) -> None:
    run = trained
    run.write("runs/calc/config.toml", folder=str(run.folder), train={"steps": 3})
    server = SqliteStore(run.store)
    with asyncio.Runner() as running:
        running.run(server.open())
        (run.store.parent / "summary.json").unlink()
        assert listed(run)[0]["state"] == "running"
        (run.store.parent / "summary.json").write_text("{}")
        assert listed(run)[0]["state"] == "finished", "it is evaluated again, and its training is over"
        refused = run.agl("runs", "prune", "calc", "--steps", "0", "--checkpoints", "1")
        assert isinstance(refused.exception, StoreError)
        assert "is being written by another process" in str(refused.exception)
        running.run(server.close())
    assert len(Checkpoints(run.store.parent / "checkpoints", 1).all()) == 3
    assert isinstance(run.agl("runs", "prune", "none").exception, ConfigError)


# Looking at a run runs no code that its folder names: it may be somebody else's.


PLUGIN = """
from pathlib import Path
import agl_core
from agl_server.store.sqlite import SqliteStore

Path(__file__).with_name("it-ran").touch()

@agl_core.hookimpl
def register_components(register):
    build = lambda options, folder, read_only: SqliteStore(folder / "store.sqlite", read_only=read_only)
    register(agl_core.kinds.STORE, "theirs", build)
"""

LOOKING: tuple[str, ...] = (
    "rollouts RUN",
    "show RUN s1-g0-m0",
    "export RUN --to episodes --out episodes.jsonl",
    "runs list",
    "runs prune RUN",
    "reward try RUN/config.toml",
)


@pytest.fixture
def foreign(run: Any) -> Any:
    """The run, whose configuration names a plugin file in its folder, and a store that this brings."""
    folder = run.folder / "runs" / "calc"
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "checkpoints" / "step-1" / "default" / "model").mkdir(parents=True)
    plugins = ["trial_rules.py", "runs/calc/plugin.py"]
    run.write("runs/calc/config.toml", folder="../..", plugins=plugins, store={"name": "theirs"})
    return run


@pytest.mark.parametrize("command", LOOKING)
def test_no_code_of_the_run_runs(foreign: Any, command: str) -> None:
    foreign.agl(*command.replace("RUN", "runs/calc").split())

    assert not (foreign.folder / "runs" / "calc" / "it-ran").exists()


def test_trying_rewards_asks_first(foreign: Any, agl: Agl, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign.write("runs/calc/config.toml", folder="../..", plugins=["trial_rules.py", "runs/calc/plugin.py"])
    ran = foreign.folder / "runs" / "calc" / "it-ran"
    command = ("reward", "try", "runs/calc/config.toml")

    with open(os.devnull) as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        refused = agl(*command)
    assert refused.returncode == 2
    assert f"of {ran.with_name('plugin.py')}, with your rights" in refused.stderr
    assert "--yes" in refused.stderr
    terminal, its_end = pty.openpty()
    with open(its_end) as typed:
        monkeypatch.setattr(sys, "stdin", typed)
        for answer, status in ((b"n\n", 1), (b"y\n", 0)):
            assert not ran.exists()
            os.write(terminal, answer)
            assert agl(*command).returncode == status
    os.close(terminal)
    assert ran.exists()


# Runs from Python: what was recorded as tables, also where an event loop runs.


async def test_a_run_is_read_as_tables_in_a_notebooks_loop(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    read = agl_server.Run("calc")
    rollouts, transitions = read.rollouts(), read.transitions()
    assert dict(zip(rollouts["rollout"], rollouts["terminal_reward"], strict=True)) == {
        f"s1-g0-{member}": ENDS[member][2] for member in ENDS
    }
    assert transitions["prompt_ids"].map(list).tolist()[:2] == [[1, 2, 3], [1, 2, 3, 4]]
    assert set(read.transitions(max_reward=0.5)["rollout"]) == {"s1-g0-m1"}
    assert read.dataset()["credit"] == transitions["credit"].tolist()
    assert (read.verdict, len(read.metrics())) == (None, 0)
    read.show("s1-g0-m0")
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
