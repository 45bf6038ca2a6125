"""A whole run: its folder, its incarnations, and what happens when it is interrupted."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from agl_core.config.check import cautions
from agl_core.config.load import LoadedConfig, dump
from agl_core.errors import CheckpointError
from agl_core.store.interface import Store
from agl_core.training.checkpoints import Checkpoints, RunState, read_state
from agl_core.training.loop import Trainer, uninterrupted
from agl_core.training.metrics import MetricsLog
from agl_core.training.progress import Observer
from agl_core.training.report import Summary
from agl_core.training.session import Session, open_session
from agl_core.types import Ending, RolloutState, Run

CONFIG_FILE = "config.toml"


def new_run_dir(loaded: LoadedConfig) -> Path:
    """`runs/NAME`, or `runs/NAME-2` and so on if it is taken; holds the configuration as resolved."""
    base = loaded.config.runs / loaded.config.name
    candidates = (base if number == 1 else base.with_name(f"{base.name}-{number}") for number in range(1, 10_000))
    for folder in candidates:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        (folder / CONFIG_FILE).write_text(dump(loaded.config))
        return folder
    raise CheckpointError(f"{base} and thousands of folders beside it are taken. Remove some or set `name`.")


async def train(loaded: LoadedConfig, run_dir: Path, observer: Observer, *, resume: bool = False) -> Summary:
    """Train in `run_dir`, from its last checkpoint if `resume`; returns what came of it, also when interrupted."""
    config = loaded.config
    checkpoints = Checkpoints(run_dir / "checkpoints", config.train.keep_checkpoints)
    weights = checkpoints.latest() if resume and checkpoints.all() else None
    state = read_state(weights) if weights else RunState()
    store: Store = loaded.store.build(run_dir)
    async with store:
        incarnation = await _begin(store, loaded, run_dir.name, state.step if resume else None)
        log = MetricsLog(
            run_dir / "metrics.jsonl",
            [tracker.build(run_dir) for tracker in loaded.trackers.values()],
            incarnation,
        )
        log.forget_after(state.step if weights else -1)
        for caution in cautions(loaded):
            observer.say(caution)
        try:
            async with open_session(loaded, run_dir, incarnation, store, observer, weights) as session:
                trainer = _trainer(loaded, run_dir, session, incarnation, checkpoints, log, observer, state)
                interrupted = await _until_done(trainer, observer)
                worker = session.worker and session.worker.worker
                return Summary(
                    run_dir=run_dir,
                    seed=config.seed,
                    state=state,
                    interrupted=interrupted,
                    checkpoint=checkpoints.all()[-1] if checkpoints.all() else None,
                    abandoned=worker.abandoned if worker else 0,
                    problems=dict(worker.problems) if worker else {},
                )
        finally:
            log.close()


async def evaluate(loaded: LoadedConfig, run_dir: Path, checkpoint: Path | None, observer: Observer) -> list[Any]:
    """Evaluate a checkpoint (None: the initial weights) on every held-out set; one entry per set and mode."""
    step = read_state(checkpoint).step if checkpoint else 0
    store: Store = loaded.store.build(run_dir)
    async with store:
        incarnation = await _begin(store, loaded, run_dir.name, step)
        async with open_session(loaded, run_dir, incarnation, store, observer, checkpoint) as session:
            entries, _, _ = await session.evaluator.evaluate(step)
            return entries


async def _begin(store: Store, loaded: LoadedConfig, run: str, resumed_step: int | None) -> int:
    """Record this incarnation; what an earlier one left unfinished is lost."""
    earlier = [r for r in await store.runs() if r.id == run]
    incarnation = max((r.incarnation for r in earlier), default=-1) + 1
    left = [
        rollout
        for state in (RolloutState.QUEUED, RolloutState.RUNNING)
        for rollout in await store.rollouts(run=run, state=state)
    ]
    config = loaded.config.model_dump(mode="json")
    await store.put(
        Run(run, incarnation, time.time(), config, resumed_step if earlier else None),
        *(replace(rollout, state=RolloutState.DONE, ending=Ending.LOST) for rollout in left),
    )
    return incarnation


def _trainer(
    loaded: LoadedConfig,
    run_dir: Path,
    session: Session,
    incarnation: int,
    checkpoints: Checkpoints,
    log: MetricsLog,
    observer: Observer,
    state: RunState,
) -> Trainer:
    return Trainer(
        config=loaded.config,
        policies=loaded.policies,
        run=run_dir.name,
        incarnation=incarnation,
        tasks=session.tasks["train"],
        engine=session.engine,
        store=session.store,
        collector=session.collector,
        buffer=loaded.buffer.build(),
        evaluator=session.evaluator,
        checkpoints=checkpoints,
        log=log,
        observer=observer,
        hook=loaded.plugins.hook,
        versions=session.server.versions,
        state=state,
        saved_step=state.step,
    )


async def _until_done(trainer: Trainer, observer: Observer) -> bool:
    """Train; on Ctrl-C or SIGTERM stop at once, save what was learned, and return True."""
    task = asyncio.ensure_future(trainer.train())
    with _on_signal(task):
        try:
            await task
        except asyncio.CancelledError:
            observer.say("stopping; saving a checkpoint")
            if trainer.state.step > trainer.saved_step:
                await uninterrupted(trainer.checkpoint())
            return True
        finally:
            trainer.count_time()
    return False


@contextmanager
def _on_signal(task: asyncio.Task[None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM cancels `task`; a second one gets the default treatment."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        for each in signals:
            loop.remove_signal_handler(each)
        task.cancel()

    for each in signals:
        loop.add_signal_handler(each, stop)
    try:
        yield
    finally:
        for each in signals:
            loop.remove_signal_handler(each)
