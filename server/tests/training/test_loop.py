"""The loop's order, what an interruption may not part, checkpoints, and runs that are resumed from them."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from scripted_run import MINIMAL, CountingEngine, Lines

from agl_core.config.load import SERVED, load
from agl_core.errors import CheckpointError, StoreError
from agl_core.types import Batch, TrainingRecord
from agl_server.training.checkpoints import Checkpoints, RunState, model_links, read_state
from agl_server.training.evaluation import Evaluation
from agl_server.training.run import local_server
from agl_server.training.session import begin_restart

from .scripted_training import Bench, make_bench


def journal(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The actions of a run's parts from now on, in order."""
    events: list[str] = []

    def noted(part: Any, name: str, what: str) -> None:
        wrapped = getattr(part, name)

        def note(*arguments: Any, **named: Any) -> Any:
            events.append(what)
            return wrapped(*arguments, **named)

        monkeypatch.setattr(part, name, note)

    async def evaluate(step: int) -> Evaluation:
        events.append("evaluate")
        return Evaluation([{"step": step, "set": "eval", "mode": "greedy", "reward": step / 4, "seconds": 0.25}])

    async def record(*records: Any) -> None:
        events.append(f"record, as version {bench.trainer.session.versions['default']} is served")

    monkeypatch.setattr(bench.trainer.session.evaluator, "evaluate", evaluate)
    noted(bench.collector, "enqueue", "roll out")
    noted(bench.engine, "update", "update")
    noted(bench.engine, "save", "checkpoint")
    monkeypatch.setattr(bench.store, "put", record)
    noted(bench.log, "write", "log")
    return events


@pytest.mark.parametrize("eval_every", [0, 2])
async def test_a_step_rolls_out_updates_publishes_records_and_then_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eval_every: int
) -> None:
    bench = make_bench(tmp_path, steps=3, groups_per_step=1, checkpoint_every=2, eval_every=eval_every)
    events, lines = journal(bench, monkeypatch), Lines()

    await replace(bench.trainer, observer=lines).train()

    def step(version: int) -> list[str]:
        return ["roll out", "update", f"record, as version {version} is served", "log"]

    evaluation = ["evaluate", "log"] if eval_every else []
    # The last step is evaluated and saved whether or not it is its turn.
    ends = [*evaluation, "checkpoint"]
    assert events == [*evaluation, *step(1), *step(2), *ends, *step(3), *ends]
    assert [line for line in lines.lines if "eval" in line] == [
        f"step {step:>3}/3  eval greedy {step / 4:.3f}  0.2 s" for step in (0, 2, 3) if eval_every
    ]
    step_line = r"step   1/3  reward \d\.\d{3}  \d+ \+ \d+ tokens  rollouts \d+\.\d s  update \d+\.\d s"
    assert any(re.fullmatch(step_line, line) for line in lines.lines)


class HeldEngine(CountingEngine):
    """An update waits until a test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def update(self, policy: str, batch: Batch, progress: Any = None) -> Any:
        self.begun.set()
        await self.go_on.wait()
        return await super().update(policy, batch, progress)


async def test_weights_that_have_begun_to_move_are_recorded_before_an_interruption_ends_the_run(tmp_path: Path) -> None:
    bench, engine = make_bench(tmp_path), HeldEngine()
    bench.engine = cast(Any, bench.trainer.session).engine = engine
    training = asyncio.create_task(bench.trainer.train())
    await engine.begun.wait()

    training.cancel()
    await asyncio.sleep(0)
    assert not training.done()
    engine.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await training

    assert engine.version == bench.trainer.state.step == len(bench.log.lines) == 1
    recorded = {record.rollout for record in bench.store.written if isinstance(record, TrainingRecord)}
    assert recorded == {id for step in bench.trained for id in step}


async def test_an_interruption_while_agents_run_cancels_their_rollouts_and_trains_on_none(tmp_path: Path) -> None:
    bench, waiting = make_bench(tmp_path), asyncio.Event()

    async def never(ids: Any) -> Any:
        waiting.set()
        await asyncio.Event().wait()

    bench.collector.finished = never  # type: ignore[method-assign]
    training = asyncio.create_task(bench.trainer.train())
    await waiting.wait()
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training

    assert bench.collector.cancelled == set(bench.collector.begun)
    assert (bench.trained, bench.trainer.state.step) == ([], 0)


def lasting(state: RunState) -> RunState:
    """A run's state without what time and place decide."""
    return replace(state, seconds=0.0, peak_rss_bytes=0)


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("stop", [1, 3])
async def test_every_part_of_the_state_goes_on_where_it_was(
    tmp_path: Path, stop: int, max_staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished evaluation is not repeated before the run goes on."""

    def evaluating(folder: str, state: RunState | None = None, **settings: int) -> tuple[Bench, list[str]]:
        bench = make_bench(tmp_path / folder, state, max_staleness=max_staleness, eval_every=1, **settings)
        return bench, journal(bench, monkeypatch)

    whole, _ = evaluating("whole", steps=4)
    await whole.trainer.train()

    first, _ = evaluating("parts", steps=stop)
    await first.trainer.train()
    saved = read_state(first.trainer.checkpoints.latest())
    assert saved == first.trainer.state
    second, events = evaluating("parts", saved, restart=1, steps=4)
    await second.trainer.train()

    assert events[0] == "roll out"
    assert lasting(second.trainer.state) == lasting(whole.trainer.state)
    assert first.metric("step") + second.metric("step") == whole.metric("step")
    assert [*first.trained, *([id.replace("-r1", "") for id in step] for step in second.trained)] == whole.trained


async def test_the_best_evaluation_so_far_has_a_checkpoint_and_a_plateau_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(tmp_path, steps=9, checkpoint_every=100, eval_every=1, eval_patience=3)
    rewards = (0.5, 0.4, 0.6, 0.5, 0.6, 0.6, 0.9, 1.0, 1.0, 1.0)

    async def evaluate(step: int) -> Evaluation:
        return Evaluation([{"step": step, "set": "eval", "mode": "greedy", "reward": rewards[step], "seconds": 0.25}])

    monkeypatch.setattr(bench.trainer.session.evaluator, "evaluate", evaluate)
    await bench.trainer.train()
    assert bench.trainer.state.step == 5
    checkpoints = bench.trainer.checkpoints
    assert [path.name for path in checkpoints.all()] == ["step-000002", "step-000005"]
    assert checkpoints.best() == checkpoints.path(5)  # The latest of equals.


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=8),
    patience=st.integers(0, 4),
    of_replies=st.booleans(),
)
def test_a_plateau_is_a_best_reward_that_as_many_later_ones_did_not_beat(
    rewards: list[float], patience: int, of_replies: bool
) -> None:
    """Of recorded replies: a lowest loss."""
    evaluations: list[dict[str, Any]] = []
    for number, reward in enumerate(rewards):
        for name, mode in itertools.product(("easy", "eval"), ("greedy", "sampled")):
            value = reward if (name, mode) == ("eval", "greedy") else number
            score = {"loss": -value} if of_replies else {"reward": value}
            evaluations.append({"step": 10 * number, "set": name, "mode": mode, **score})
    best = 0
    while better := [n for n in range(best, len(rewards)) if rewards[n] > rewards[best]]:
        best = better[0]
    waits = len(rewards) - 1 - best
    reason = RunState(evaluations=evaluations).plateau(patience)
    assert bool(reason) == (0 < patience <= waits)
    assert not reason or f"none of {waits} evaluations was better than that of step {10 * best} (" in reason


async def test_an_empty_store_is_not_served_where_a_run_was_begun(tmp_path: Path) -> None:
    file, run = tmp_path / "train.toml", tmp_path / "run"
    run.mkdir()
    file.write_text(tomli_w.dumps(MINIMAL))
    loaded, store = load(file, needs=SERVED), run / "store.sqlite"
    async with local_server(loaded, run):
        pass
    store.unlink()  # Before a run is begun there is nothing to lose.
    async with local_server(loaded, run) as server:
        await begin_restart(server, loaded.config, run, None)
    saved = store.read_bytes()
    for content in (None, b""):
        store.unlink() if content is None else store.write_bytes(content)
        with pytest.raises(StoreError, match=rf"{store} is empty, but .*server\.json says that a run was begun"):
            async with local_server(loaded, run):
                pass
    store.write_bytes(saved)
    async with local_server(loaded, run) as server:
        assert [run.id for run in await server.store.runs()] == ["run"]


# Checkpoints are whole or not there, and keep what should be kept.


def save(checkpoints: Checkpoints, step: int, *policies: str, **state: Any) -> Path:
    part = checkpoints.begin(step)
    (part / "weights").write_text(str(step))
    for policy in policies:
        (part / policy / "model").mkdir(parents=True)
        (part / policy / "model" / "config.json").write_text(f"{policy} {step}")
    return checkpoints.commit(part, RunState(step=step, **state))


def test_the_best_and_the_stable_ones_are_kept_too(tmp_path: Path) -> None:
    def evaluated(step: int, reward: float, name: str = "eval") -> dict[str, Any]:
        return {"step": step, "set": name, "mode": "greedy", "reward": reward, "rollouts": 1, "seconds": 1.0}

    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    evaluations = [evaluated(0, 0.9), evaluated(0, 0.9, "easy")]
    for step, reward in ((1, 0.2), (2, 0.8), (3, 0.8), (4, 0.1), (5, None)):
        if reward is not None:
            evaluations += [evaluated(step, 1 - reward, "easy"), evaluated(step, reward)]
        save(checkpoints, step, evaluations=list(evaluations))
    assert [path.name for path in checkpoints.all()] == ["step-000003", "step-000005"]
    ledger = tmp_path / "versions.jsonl"
    ledger.write_text('{"kept": [1]}\n{"kept": [5]}\n{"kept": [')
    save(checkpoints, 6)
    assert [path.name for path in checkpoints.all()] == ["step-000003", "step-000005", "step-000006"]
    assert checkpoints.meant_by("stable") == checkpoints.path(5)
    ledger.write_text("[]\n")
    with pytest.raises(CheckpointError, match=r"versions.jsonl does not say which versions are in use"):
        checkpoints.prune()


def test_what_is_cut_off_leaves_no_checkpoint_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    (checkpoints.begin(2) / "weights").write_text("half")
    assert checkpoints.all() == [checkpoints.path(1)]
    monkeypatch.setattr("shutil.rmtree", lambda path, **_: (path / "weights").unlink(missing_ok=True))
    save(checkpoints, 3)
    assert checkpoints.all() == [checkpoints.path(3)]


def test_links_lead_to_the_latest_weights_also_after_the_run_was_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    for step in (5, 10):
        save(checkpoints, step, "default")
        assert (run / "model" / "config.json").read_text() == f"default {step}"
    assert model_links(checkpoints.latest()) == {run / "model": checkpoints.path(10) / "default" / "model"}
    (run / "model-critic" / "mine").mkdir(parents=True)
    save(checkpoints, 11, "writer", "critic")
    assert f"{run / 'model-critic'} cannot be made a link to the weights in" in caplog.text
    assert (run / "model-critic" / "mine").is_dir()

    run.rename(tmp_path / "moved")

    assert (tmp_path / "moved" / "model-writer" / "config.json").read_text() == "writer 11"


def test_nothing_to_resume_from_says_what_to_do(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoints.latest()
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state(tmp_path)
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot be written \(.*Not a directory: .*checkpoints"):
        checkpoints.begin(1)


def test_files_and_folders_are_on_the_disk_before_the_checkpoint_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each inode is synced before the rename, and the folder that has the name after it."""
    done: list[object] = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda opened: (done.append(os.fstat(opened).st_ino), sync(opened)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("renamed"), rename(old, new)))

    checkpoint = save(Checkpoints(tmp_path, keep=1), 1, "default")

    renamed = done.index("renamed")
    inside = {path.stat().st_ino for path in (checkpoint, *checkpoint.rglob("*"))}
    assert len(inside) == 6  # the checkpoint, two folders in it, and three files
    assert inside <= set(done[:renamed])
    assert tmp_path.stat().st_ino in done[renamed:]


def test_a_checkpoint_that_cannot_be_written_says_so_and_keeps_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)

    def fails(opened: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(CheckpointError, match=r"step-000002 cannot be written.*No space left.*resume the run"):
        save(checkpoints, 2)
    assert checkpoints.all() == [checkpoints.path(1)]
