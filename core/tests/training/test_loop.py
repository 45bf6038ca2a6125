"""The loop's order, what an interruption may not part, and that a resumed run goes on as if there had been none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from agl_core.training.checkpoints import RunState, read_state
from agl_core.training.evaluate import Evaluated
from agl_core.types import Batch, TrainingRecord

from .scripted_training import Bench, CountingEngine, make_bench


def journal(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the parts of a run are asked to do from now on, in order."""
    told: list[str] = []

    def noted(place: Any, name: str, what: str) -> None:
        wrapped = getattr(place, name)

        def note(*arguments: Any, **named: Any) -> Any:
            told.append(what)
            return wrapped(*arguments, **named)

        monkeypatch.setattr(place, name, note)

    async def evaluate(step: int) -> Evaluated:
        told.append("evaluate")
        return Evaluated(
            [{"step": step, "set": "eval", "mode": "greedy", "reward": 0.5, "seconds": 0.0}], {}, 1, [], []
        )

    async def record(*records: Any) -> None:
        told.append(f"record, as version {bench.trainer.session.versions['default']} is served")

    monkeypatch.setattr(bench.trainer.session.evaluator, "evaluate", evaluate)
    noted(bench.collector, "enqueue", "roll out")
    noted(bench.engine, "update", "update")
    noted(bench.engine, "save", "checkpoint")
    monkeypatch.setattr(bench.store, "put", record)
    noted(bench.log, "write", "log")
    return told


async def test_a_step_rolls_out_updates_publishes_records_and_then_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(tmp_path, steps=3, groups_per_step=1, checkpoint_every=2, eval_every=2)
    told = journal(bench, monkeypatch)

    await bench.trainer.train()

    def step(version: int) -> list[str]:
        return ["roll out", "update", f"record, as version {version} is served", "log"]

    # The last step is evaluated and saved whether or not it is its turn.
    ends = ["evaluate", "log", "checkpoint"]
    assert told == ["evaluate", "log", *step(1), *step(2), *ends, *step(3), *ends]


async def test_without_evaluations_there_is_none_at_the_ends_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(tmp_path, steps=2, eval_every=0)
    told = journal(bench, monkeypatch)

    await bench.trainer.train()

    assert "evaluate" not in told
    assert told.count("checkpoint") == 2


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
    bench = make_bench(tmp_path)
    engine = HeldEngine()
    bench.engine = engine
    cast(Any, bench.trainer.session).engine = engine
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
    bench = make_bench(tmp_path)
    waiting = asyncio.Event()

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
@pytest.mark.parametrize("stop", [1, 2, 3])
async def test_every_part_of_the_state_goes_on_where_it_was(tmp_path: Path, stop: int, max_staleness: int) -> None:
    whole = make_bench(tmp_path / "whole", steps=4, max_staleness=max_staleness)
    await whole.trainer.train()

    first = make_bench(tmp_path / "parts", steps=stop, max_staleness=max_staleness)
    await first.trainer.train()
    saved = read_state(first.trainer.checkpoints.latest())
    assert saved == first.trainer.state
    second = make_bench(tmp_path / "parts", saved, restart=1, steps=4, max_staleness=max_staleness)
    await second.trainer.train()

    assert lasting(second.trainer.state) == lasting(whole.trainer.state)
    assert first.metric("step") + second.metric("step") == whole.metric("step")
    assert [*first.trained, *([id.replace("-r1", "") for id in step] for step in second.trained)] == whole.trained


async def test_a_resumed_run_that_was_evaluated_is_not_evaluated_again_before_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_bench(tmp_path, steps=2, eval_every=1)
    journal(first, monkeypatch)
    await first.trainer.train()

    second = make_bench(tmp_path, read_state(first.trainer.checkpoints.latest()), restart=1, steps=3, eval_every=1)
    told = journal(second, monkeypatch)
    await second.trainer.train()

    assert told[0] == "roll out"
    assert [entry["step"] for entry in second.trainer.state.evaluations] == [0, 1, 2, 3]
