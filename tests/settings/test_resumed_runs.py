"""A run goes on from the checkpoint that it is told, if that is whole, and says what has changed since."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from agl_core.cli import app
from agl_core.config.load import load
from agl_core.errors import ConfigError, PluginError
from agl_core.types import Rollout, Run
from agl_server.reading.explained import is_superseded
from agl_server.reading.runs import read_entry
from agl_server.store.sqlite import SqliteStore
from agl_server.training.checkpoints import Checkpoints, read_state
from agl_server.training.metrics import Summary
from agl_server.training.run import evaluate, new_run_dir, train

from ..support.scripted_run import Lines
from . import scripted_agent, scripted_parts
from .conftest import Bench
from .scripted_parts import SEEN


async def trained(bench: Bench, **settings: Any) -> Path:
    """A run of three steps, with a checkpoint after each."""
    given = {"train.steps": 3, "train.checkpoint_every": 1, "train.keep_checkpoints": 3, "eval.tasks": 1, **settings}
    loaded = bench.load(given)
    run_dir = new_run_dir(loaded)
    await train(loaded, run_dir, Lines())
    return run_dir


async def resumed(run_dir: Path, *overrides: str, heard: Lines | None = None) -> Summary:
    return await train(load(run_dir / "config.toml", overrides), run_dir, heard or Lines(), resume=True)


def agl(*arguments: str | Path) -> str:
    """The output of a command; an error that it raises on purpose is raised."""
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, [str(part) for part in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


async def recorded(run_dir: Path) -> tuple[list[Run], list[Rollout]]:
    async with SqliteStore(run_dir / "store.sqlite", read_only=True) as store:
        return await store.runs(), await store.rollouts()


def metrics(run_dir: Path) -> list[tuple[int, int]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["restart"]) for line in lines if line["kind"] == "train"]


async def test_a_checkpoint_that_is_named_is_gone_on_from_and_what_came_after_is_superseded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = await trained(bench)
    checkpoints = run_dir / "checkpoints"
    later = [checkpoints / name for name in ("step-000002", "step-000003")]
    (run_dir / SEEN).unlink()
    heard = Lines()

    loaded = load(run_dir / "config.toml", ["train.checkpoint_every=100"])
    summary = await train(loaded, run_dir, heard, resume=True, checkpoint=checkpoints / "step-000001")

    assert [line for line in heard.lines if "superseded" in line] == [
        f"removed {path}, which is superseded" for path in later
    ]
    assert (summary.state.step, summary.checkpoint) == (3, checkpoints / "step-000003")
    assert [path.name for path in sorted(checkpoints.iterdir())] == ["step-000001", "step-000003"]
    assert json.loads((run_dir / SEEN).read_text())["loaded"] == ["step-000001"]
    assert metrics(run_dir) == [(1, 0), (2, 1), (3, 1)]
    runs, rollouts = await recorded(run_dir)
    assert [run.resumed_step for run in runs] == [None, 1]
    gone = {(r.step, r.restart) for r in rollouts if is_superseded(r, runs)}
    assert gone == {(2, 0), (3, 0)}


@pytest.fixture
async def settled(bench: Bench) -> Path:
    """A run with a checkpoint, which an evaluation with another seed has looked at since."""
    run_dir = await trained(bench)
    await evaluate(load(run_dir / "config.toml", seed=5), run_dir, run_dir / "checkpoints" / "step-000003", Lines())
    (run_dir / SEEN).unlink()
    return run_dir


async def test_what_changes_is_listed_and_holds_from_then_on(settled: Path) -> None:
    heard, again = Lines(), Lines()

    await resumed(settled, "train.steps=4", "policies.default.optimizer.learning_rate=0.5", heard=heard)
    await resumed(settled, "train.steps=5", heard=again)

    assert [line for line in heard.lines if "changed" in line] == [
        "changed since step-000003: policies.default.optimizer.learning_rate: 0.01 → 0.5",
        "changed since step-000003: train.steps: 3 → 4",
    ]
    assert [line for line in again.lines if "changed" in line] == ["changed since step-000004: train.steps: 4 → 5"]
    stored = tomllib.loads((settled / "config.toml").read_text())
    runs, _ = await recorded(settled)
    for config in (stored, runs[-1].config):
        assert config["policies"]["default"]["optimizer"]["learning_rate"] == 0.5
        assert config["train"]["steps"] == 5
    assert [run.config["train"]["steps"] for run in runs] == [3, 3, 4, 5]
    [policy] = json.loads((settled / SEEN).read_text())["policies"].values()
    assert policy["optimizer"]["learning_rate"] == 0.5


def test_the_evaluation_of_an_earlier_checkpoint_is_printed_and_recorded(bench: Bench) -> None:
    run_dir = asyncio.run(trained(bench))
    printed = agl("eval", f"{run_dir}@1", "--json")
    [entry] = json.loads(printed[printed.index("{\n") :])["evaluations"]
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["step"], last["restart"]) == ("eval", 1, 1)
    assert last[f"{entry['set']}/{entry['mode']}/reward/mean"] == entry["reward"]
    assert "superseded" not in agl("rollouts", run_dir, "--step=3", "--mode=train")


REFUSED = {
    "seed=9": "seed: 0 → 9",
    "name=another": 'name: "run" → "another"',
    "engine.name=scripted-too": 'engine.name: "scripted" → "scripted-too"',
    "policies.default.model.dtype=bfloat16": 'policies.default.model.dtype: "auto" → "bfloat16"',
    "policies.default.model.lora.rank=4": "policies.default.model.lora: not set → ",
    "policies.default.model.path=WEIGHTS": "policies.default.model.path: ",
    "policies.more.model.path=WEIGHTS": "policies.more: not set → ",
}


async def test_what_cannot_change_is_refused_before_anything_begins(
    settled: Path, tmp_path: Path, bench: Bench
) -> None:
    other = shutil.copytree(bench.weights, tmp_path / "other")
    before = (settled / "config.toml").read_text()

    for override, message in REFUSED.items():
        with pytest.raises(ConfigError) as raised:
            await resumed(settled, "train.steps=9", override.replace("WEIGHTS", str(other)))
        assert f"cannot go on from {settled}/checkpoints/step-000003" in str(raised.value)
        assert message in str(raised.value)
        assert "train.steps" not in str(raised.value), "it can change"
        assert "start a new run from the weights" in str(raised.value)

    assert not (settled / SEEN).exists(), "the engine was started"
    assert (settled / "config.toml").read_text() == before
    runs, _ = await recorded(settled)
    assert len(runs) == 2


@pytest.fixture
def project(tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that a run needs, and nothing but relative paths in its configuration."""
    folder = tmp_path / "project"
    shutil.copytree(bench.folder, folder, ignore=shutil.ignore_patterns("runs"))
    shutil.copytree(bench.weights, folder / "weights")
    for module in (scripted_parts, scripted_agent):
        shutil.copy(module.__file__, folder)
    config = bench.written({"train.steps": 2, "train.checkpoint_every": 1, "eval.tasks": 1})
    config |= {"runs": "runs", "plugins": ["scripted_parts.py"]}
    config["policies"]["default"]["model"]["path"] = "weights"
    (folder / "train.toml").write_text(tomli_w.dumps(config))
    monkeypatch.chdir(folder)
    return folder


async def test_a_project_is_moved_with_its_runs(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(Path("train.toml"))
    run_dir = new_run_dir(loaded).resolve()
    await train(loaded, run_dir, Lines())
    assert str(project) not in (run_dir / "config.toml").read_text()

    moved = project.parent / "deep" / "moved"
    moved.parent.mkdir()
    shutil.move(project, moved)
    monkeypatch.chdir(moved.parent)
    heard = Lines()
    summary = await resumed(moved / "runs" / "run", "train.steps=3", heard=heard)

    assert summary.state.step == 3
    assert [line for line in heard.lines if "changed" in line] == ["changed since step-000002: train.steps: 2 → 3"]

    elsewhere = shutil.move(moved / "weights", moved.parent / "weights")
    heard = Lines()
    await resumed(moved / "runs" / "run", f"policies.default.model.path={elsewhere}", heard=heard)
    assert "all 3 steps are made; to train on, raise train.steps: --set train.steps=6" in heard.lines
    assert [line for line in heard.lines if "changed" in line] == [
        f'changed since step-000003: policies.default.model.path: "weights" → "{elsewhere}"'
    ]


async def test_a_run_that_is_moved_away_and_renamed_is_resumed_and_read(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(Path("train.toml"))
    run_dir = new_run_dir(loaded).resolve()
    await train(loaded, run_dir, Lines())
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "kept" / "deeper" / "other-name"
    kept.parent.mkdir(parents=True)
    shutil.move(run_dir, kept)

    with pytest.raises((ConfigError, PluginError), match="`folder`"):
        load(kept / "config.toml")
    await resumed(kept, "train.steps=3", f"folder={project}")
    runs, rollouts = await recorded(kept)
    assert [(run.id, run.restart, run.resumed_step) for run in runs] == [("run", 0, None), ("run", 1, 2)]

    shutil.rmtree(project)
    trained_on = next(r.id for r in rollouts if r.mode.trains)
    shown = await asyncio.to_thread(agl, "show", kept, trained_on)
    assert f"rollout {trained_on}" in shown
    assert trained_on in await asyncio.to_thread(agl, "rollouts", kept, "--limit=100")
    tried = await asyncio.to_thread(agl, "reward", "try", "--yes", kept / "config.toml")
    assert "0 of 4 rollouts change" in tried
    assert "caution: the plugin file" in tried


async def test_a_run_that_stopped_early_says_so_and_goes_on_only_if_told(bench: Bench) -> None:
    """The scripted agent has the same held-out reward from the first evaluation on."""
    given = {"train.steps": 5, "eval.patience": 2, "eval.every": 1, "train.checkpoint_every": 100}
    loaded = bench.load(given)
    run_dir = new_run_dir(loaded)
    heard, again, on = Lines(), Lines(), Lines()

    def entry(summary: Summary) -> tuple[str, int, int | None, str]:
        summary.write()
        read = read_entry(run_dir)
        assert read.verdict is not None
        return read.state, read.steps, read.of_steps, read.verdict.why.partition("; ")[2]

    summary = await train(loaded, run_dir, heard)
    assert (summary.state.step, summary.checkpoint) == (2, run_dir / "checkpoints" / "step-000002")
    reason = "stopped early at step 2: none of 2 evaluations was better than that of step 0 (1)"
    assert entry(summary) == ("finished early", 2, 5, reason)
    [reason_line] = [line for line in heard.lines if line.startswith(f"Training {reason}. To train on, resume")]
    assert "finished early" in agl("runs", "list", run_dir.parent)

    summary = await resumed(run_dir, heard=again)
    assert summary.state.step == 2
    assert reason_line in again.lines
    assert entry(summary) == ("finished early", 2, 5, reason)

    summary = await resumed(run_dir, "eval.patience=0", heard=on)
    assert summary.state.step == 5
    assert reason_line not in on.lines
    assert entry(summary) == ("finished", 5, 5, "")


async def test_a_run_ends_at_its_budget_of_tokens_which_no_resume_gives_back(bench: Bench) -> None:
    """By the engine's own counters, which begin at 0 in each restart; tokens from the cache are free."""
    prices = {"prices.prefill": 1.0, "prices.sample": 2.0, "prices.train": 4.0}
    given = {"train.steps": 9, "train.stop.tokens": 700, "eval.every": 2, "train.checkpoint_every": 100, **prices}
    loaded = bench.load(given)
    run_dir = new_run_dir(loaded)
    heard, on = Lines(), Lines()

    def counted() -> Counter[str]:
        """By the engine of the latest restart."""
        counts = json.loads((run_dir / SEEN).read_text())["counted"]
        return Counter({key.removeprefix("tokens_"): int(n) for key, n in counts.items() if key != "tokens_reused"})

    def by_line() -> list[Counter[str]]:
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        kinds = ("prefilled", "decoded", "trained")
        return [Counter({kind: int(line[f"tokens/{kind}"]) for kind in kinds}) for line in lines]

    summary = await train(loaded, run_dir, heard)
    spent, lines = counted(), by_line()
    assert summary.state.tokens == spent == sum(lines, Counter[str]())
    assert sum(lines[:-1], Counter[str]()).total() < 700 <= spent.total()
    reason = f"{spent.total()} tokens are spent, and train.stop.tokens is 700"
    assert summary.verdict is not None
    assert summary.verdict.why.endswith(f"; stopped early at step {summary.state.step}: {reason}")
    assert summary.checkpoint == run_dir / "checkpoints" / f"step-{summary.state.step:06d}"
    [said] = [line for line in heard.lines if line.startswith("Training stopped early")]
    assert f"{reason}. To train on, resume it with a higher train.stop.tokens" in said
    cost = (spent["prefilled"] + 2 * spent["decoded"] + 4 * spent["trained"]) / 1e6
    assert (summary.as_json()["tokens"], summary.as_json()["cost"]) == (spent, pytest.approx(cost))
    assert all(re.search(r"  cost \d", line) for line in heard.lines if re.match(r"step +\d+/9  reward", line))

    assert (await resumed(run_dir)).state.tokens == spent, "it makes no step"
    summary = await resumed(run_dir, "train.stop.tokens=1000", "train.checkpoint_every=1", heard=on)
    spent += counted()
    assert (summary.state.tokens, spent.total() >= 1000) == (spent, True)

    earlier = Checkpoints(run_dir / "checkpoints", 9).all()[0]
    summary = await train(load(run_dir / "config.toml"), run_dir, Lines(), resume=True, checkpoint=earlier)
    assert summary.state.step == read_state(earlier).step
    assert summary.state.tokens == spent > sum(by_line(), Counter[str]())
