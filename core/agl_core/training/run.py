"""A whole run: its folder, its incarnations, and what happens when it is interrupted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from agl_core.client import BlockingClient, FarServer, Server
from agl_core.config.check import cautions
from agl_core.config.load import CONFIG_FILE, LoadedConfig, dump
from agl_core.errors import CheckpointError, StoreError
from agl_core.server import LightningServer
from agl_core.training.checkpoints import Checkpoints, RunState, read_state
from agl_core.training.loop import Trainer, uninterrupted
from agl_core.training.metrics import MetricsLog
from agl_core.training.progress import Observer
from agl_core.training.report import Summary
from agl_core.training.serving import near_server
from agl_core.training.session import Session, open_session
from agl_core.wire.operators import FinishRequest, VersionsRequest

METRICS_FILE = "metrics.jsonl"


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


def folder_of_served(loaded: LoadedConfig, far: Server) -> Path:
    """The folder, here, of the run that a server elsewhere serves: of the same name, and without a trained run.

    On the server's own machine it is the very folder that has the store.
    """
    with BlockingClient(far.base_url, far.key) as client:
        name = client.health().run or loaded.config.name
    folder = loaded.config.runs / name
    if (folder / METRICS_FILE).exists():
        raise CheckpointError(
            f"The run {name} that the server at {far.base_url} serves has been trained already, in {folder}. Go on "
            f"with `agl train --resume {folder} --server {far.base_url}`, or serve a new one (`agl serve CONFIG --set "
            f"name=ANOTHER`)."
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(dump(loaded.config))
    return folder


async def train(
    loaded: LoadedConfig, run_dir: Path, observer: Observer, *, resume: bool = False, far: Server | None = None
) -> Summary:
    """Train in `run_dir`, from its last checkpoint if `resume`; returns what came of it, also when interrupted.

    `far` is the server to use instead of one in this process. StoreError if the run goes on, but its store is empty.
    """
    config = loaded.config
    checkpoints = Checkpoints(run_dir / "checkpoints", config.train.keep_checkpoints)
    weights = checkpoints.latest() if resume and checkpoints.all() else None
    state = read_state(weights) if weights else RunState()
    for caution in cautions(loaded):
        observer.say(caution)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(_open_server(loaded, run_dir, far))
        if state.step:
            await _check_recorded(server, run_dir, state.step)
        session = await stack.enter_async_context(
            open_session(
                loaded, run_dir, server, observer, weights=weights, resumed_step=state.step if resume else None
            )
        )
        log = MetricsLog(
            run_dir / METRICS_FILE,
            [tracker.build(run_dir) for tracker in loaded.trackers.values()],
            session.incarnation,
        )
        stack.callback(log.close)
        log.forget_after(state.step if weights else -1)
        trainer = _trainer(loaded, run_dir, session, checkpoints, log, observer, state)
        interrupted = await _until_done(trainer, observer)
        await session.serving.finish(FinishRequest(incarnation=session.incarnation, over=not interrupted))
        worker = session.worker and session.worker.worker
        return Summary(
            run_dir=run_dir,
            seed=config.seed,
            state=state,
            interrupted=interrupted,
            checkpoint=checkpoints.all()[-1] if checkpoints.all() else None,
            abandoned=worker.abandoned if worker else 0,
            problems=dict(worker.problems) if worker else {},
            server=far.base_url if far else None,
        )


async def evaluate(
    loaded: LoadedConfig, run_dir: Path, checkpoint: Path | None, observer: Observer, *, far: Server | None = None
) -> list[Any]:
    """Evaluate a checkpoint (None: the initial weights) on every held-out set; one entry per set and mode."""
    step = read_state(checkpoint).step if checkpoint else 0
    async with (
        _open_server(loaded, run_dir, far) as server,
        open_session(loaded, run_dir, server, observer, weights=checkpoint, resumed_step=step) as session,
    ):
        entries, _, _ = await session.evaluator.evaluate(step)
        return entries


def _open_server(
    loaded: LoadedConfig, run_dir: Path, far: Server | None
) -> AbstractAsyncContextManager[LightningServer | FarServer]:
    """The server of a run, in this process or at `far`."""
    return near_server(loaded, run_dir) if far is None else FarServer(far.base_url, far.key)


async def _check_recorded(server: LightningServer | FarServer, run_dir: Path, step: int) -> None:
    """StoreError if the store of a run that has been trained knows of no run: it was emptied, or is another one."""
    if isinstance(server, LightningServer):
        store, name = server.run.store, str(run_dir / "store.sqlite")
    else:
        store, name = server.store, f"of {server.base_url}"
    if not await store.runs():
        raise StoreError(
            f"The store {name} is empty, but {run_dir} has been trained up to step {step}: what was recorded of it is "
            f"lost, or is elsewhere. Restore a backup of the store, name the server that has it (--server URL), or "
            f"start a new run."
        )


def _trainer(
    loaded: LoadedConfig,
    run_dir: Path,
    session: Session,
    checkpoints: Checkpoints,
    log: MetricsLog,
    observer: Observer,
    state: RunState,
) -> Trainer:
    async def publish(versions: dict[str, int]) -> None:
        await session.serving.publish(VersionsRequest(incarnation=session.incarnation, versions=versions))

    return Trainer(
        config=loaded.config,
        policies=loaded.policies,
        run=run_dir.name,
        incarnation=session.incarnation,
        tasks=session.tasks["train"],
        engine=session.engine,
        store=session.serving.store,
        collector=session.collector,
        buffer=loaded.buffer.build(),
        evaluator=session.evaluator,
        checkpoints=checkpoints,
        log=log,
        observer=observer,
        hook=loaded.plugins.hook,
        versions=session.versions,
        publish=publish,
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
