"""The loop's order, what an interruption may not part, and that a resumed run goes on as if there had been none."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import tomli_w

from agl_core.config.load import SERVED, load
from agl_core.errors import StoreError
from agl_core.training.checkpoints import RunState, read_state
from agl_core.training.evaluation import Evaluated
from agl_core.training.server import begin_restart, local_server
from agl_core.types import Batch, TrainingRecord

from .scripted_training import MINIMAL, Bench, CountingEngine, Lines, make_bench


def journal(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The actions of a run's parts from now on, in order."""
    events: list[str] = []

    def noted(part: Any, name: str, what: str) -> None:
        wrapped = getattr(part, name)

        def note(*arguments: Any, **named: Any) -> Any:
            events.append(what)
            return wrapped(*arguments, **named)

        monkeypatch.setattr(part, name, note)

    async def evaluate(step: int) -> Evaluated:
        events.append("evaluate")
        return Evaluated([{"step": step, "set": "eval", "mode": "greedy", "reward": step / 4, "seconds": 0.25}])

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

    async def update(self, policy: str, batch: Batch, algorithm: str, options: Mapping[str, Any], *more: Any) -> Any:
        self.begun.set()
        await self.go_on.wait()
        return await super().update(policy, batch, algorithm, options, *more)


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
    """And what was evaluated is not evaluated again before the run goes on."""

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
