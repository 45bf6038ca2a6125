"""A whole run: its restarts and its interruption."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from agl_core import private
from agl_core.config.check import cautions
from agl_core.config.load import LoadedConfig, store_config
from agl_core.errors import CheckpointError, EngineError, TrainingError
from agl_core.server.keys import SourceFactory
from agl_core.training.alarms import Watch
from agl_core.training.checkpoints import CHECKPOINTS, Checkpoints, RunState, check_changes, read_state
from agl_core.training.failures import assertions_in
from agl_core.training.loop import Evaluated, Trainer, uninterrupted
from agl_core.training.metrics import METRICS_FILE, SUMMARY_FILE, MetricsLog, Observer, Summary
from agl_core.training.server import is_new, local_server, removed_unless_begun
from agl_core.training.session import Session, first_look, open_session
from agl_core.wire import SERVER_FILE
from agl_core.worker.worker import on_signals


async def train(
    loaded: LoadedConfig,
    run_dir: Path,
    observer: Observer,
    *,
    resume: bool = False,
    checkpoint: Path | None = None,
    source: SourceFactory | None = None,
    trainer_of: Callable[..., Trainer] = Trainer,
    look: bool = False,
) -> Summary:
    """Train in `run_dir`; returns the result, also when interrupted.

    If `resume`, the run goes on from `checkpoint`, by default its last one. What came after the checkpoint is
    superseded. Changes of the configuration are printed, and hold from now on. ConfigError if a change does not fit the
    checkpoint; StoreError if the run's store is empty. The folder of a new run is removed if the run cannot be started.
    With a `source` of rollouts on its server, an engine that is lost is started again, and the source goes on;
    `trainer_of` makes the trainer. With `look`, a new run begins with a rollout of the agent that is shown;
    TrainingError if it does not work.
    """
    config = loaded.config
    if not os.access(run_dir, os.W_OK):
        raise CheckpointError(
            f"The run's folder {run_dir} cannot be written, so that the run cannot go on. Check its permissions and "
            f"the disk, or go on with a copy of the folder."
        )
    checkpoints = Checkpoints(run_dir / CHECKPOINTS, config.train.keep_checkpoints)
    async with AsyncExitStack() as stack:
        begun = stack.enter_context(removed_unless_begun(run_dir if is_new(run_dir) and not resume else None))
        weights = checkpoint or (checkpoints.latest() if resume and checkpoints.all() else None)
        state = read_state(weights) if weights else RunState()
        resolved = config.model_dump(mode="json")
        if weights is not None:
            for change in check_changes(state.config, resolved, loaded.folder, weights):
                observer.say(f"changed since {weights.name}: {change}")
        state.config = resolved
        if source is None and state.step >= (steps := config.train.steps):
            observer.say(f"all {steps} steps are made; to train on, raise train.steps: --set train.steps={2 * steps}")
        for caution in cautions(loaded):
            observer.say(caution)
        trackers = {name: chosen.build(run_dir) for name, chosen in loaded.trackers.items()}
        log = MetricsLog(run_dir / METRICS_FILE, trackers)
        stack.callback(log.close)
        server = await stack.enter_async_context(local_server(loaded, run_dir, source))
        while True:
            resumed = state.step if resume else None
            async with open_session(
                loaded, run_dir, server, observer, weights=weights, resumed_step=resumed
            ) as session:
                if look and not resume and config.train.patience:
                    try:
                        await _look(session, observer)
                    except EngineError:
                        begun()  # The agent is not at fault, and the error says how to resume.
                        raise
                begun()
                private.make_folder(checkpoints.folder, exist_ok=True)
                (run_dir / SUMMARY_FILE).unlink(missing_ok=True)  # Without one, a run that is over has died.
                log.restart = session.restart
                earlier: list[Mapping[str, float]] = [*log.forget_after(state.step if weights else -1)]
                if resume:
                    store_config(config, run_dir)
                    for superseded in checkpoints.forget_after(state.step):
                        observer.say(f"removed {superseded}, which is superseded")
                trainer = trainer_of(
                    loaded,
                    session,
                    loaded.buffer.build(),
                    checkpoints,
                    log,
                    observer,
                    assertions=assertions_in(loaded),
                    state=state,
                    watch=Watch(config.alarms, tuple(config.policies), earlier),
                )
                try:
                    stopped_by = await _until_done(trainer, observer)
                except EngineError as error:
                    if source is None:
                        raise
                    observer.say(f"{error}\nTraining goes on from the last checkpoint; the server goes on meanwhile.")
                    weights, resume = checkpoints.latest(), True
                    state = read_state(weights)
                    continue
                if stopped_by is None:
                    server.queue.close()
                    server.keys.write(run_dir / SERVER_FILE, server.base_url, begun=True, over=True)
                worker = session.worker and session.worker.worker
                return Summary(
                    run_dir=run_dir,
                    seed=config.seed,
                    state=state,
                    steps=trainer.watch.steps,
                    stopped_by=stopped_by,
                    checkpoint=checkpoints.all()[-1] if checkpoints.all() else None,
                    problems=dict(worker.problems) if worker else {},
                )


async def evaluate(
    loaded: LoadedConfig, run_dir: Path, checkpoint: Path | None, observer: Observer, *, repeat: int = 1
) -> Evaluated:
    """Evaluate a checkpoint (None: the initial weights) on every held-out set, sampled tasks `repeat` times.

    The numbers are also a line of the run's metrics.jsonl. The records of later steps stay as they are: an evaluation
    does not resume the run. The folder of a new run is removed if it cannot be started.
    """
    step = read_state(checkpoint).step if checkpoint else 0
    with removed_unless_begun(run_dir if is_new(run_dir) else None) as begun:
        async with (
            local_server(loaded, run_dir) as server,
            open_session(loaded, run_dir, server, observer, weights=checkpoint) as session,
        ):
            begun()
            evaluated = await session.evaluator.evaluate(step, repeat)
            for alarm in evaluated.alarms:
                observer.say(f"step {step}, evaluation: {alarm.text}")
            log = MetricsLog(run_dir / METRICS_FILE, {}, session.restart)
            log.write(step, "eval", evaluated.metrics, evaluated.alarms)
            return evaluated


async def _look(session: Session, observer: Observer) -> None:
    """Show the agent's first rollout. TrainingError if it fails, and two more do in the same way."""
    look = await first_look(session, observer)
    for _, rollout in look.seen:
        observer.say(f"first look: {rollout}")
    if look.fault is not None:
        raise TrainingError(
            f"The agent does not work yet, so training did not begin: {look.fault.seen}. {look.fault.remedy} "
            f"{look.fault.details}\nTry it with `agl doctor CONFIG`; with train.patience = 0 there is no first look."
        )


async def _until_done(trainer: Trainer, observer: Observer) -> signal.Signals | None:
    """Train; on Ctrl-C or SIGTERM stop at once, save what was learned, and return the signal."""
    task, received = asyncio.ensure_future(trainer.train()), list[signal.Signals]()
    with ExitStack() as handling:

        def stop(number: signal.Signals) -> None:
            handling.close()  # A second one gets the default treatment.
            received.append(number)
            task.cancel()

        handling.enter_context(on_signals(stop))
        try:
            await task
        except asyncio.CancelledError:
            observer.say("stopping; saving a checkpoint")
            if trainer.state.step > trainer.saved_step:
                await uninterrupted(trainer.checkpoint())
            return received[0]
        finally:
            trainer.count_time()
    return None
