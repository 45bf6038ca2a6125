"""A whole run: its folder, the server that works in it, its restarts and its interruption."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from agl_core import private
from agl_core.client.worker import until_signal
from agl_core.config.check import cautions
from agl_core.config.load import CONFIG_FILE, LoadedConfig, store_config
from agl_core.config.models import RunConfig
from agl_core.config.sections import GatewaySection
from agl_core.errors import CheckpointError, ConfigError, EngineError, StoreError, TrainingError
from agl_core.protocols import RecordedTasks
from agl_core.wire import SERVER_FILE, ServerFile, take_key_of
from agl_server.gateway.attempts import RunSettings, SourceFactory
from agl_server.health.alarms import Watch, alarms_of, settings_of
from agl_server.health.verdict import METRICS_FILE, read_metrics
from agl_server.http.keys import Keys
from agl_server.server import LightningServer
from agl_server.training.checkpoints import CHECKPOINTS, Checkpoints, RunState, check_changes, read_state
from agl_server.training.evaluation import Evaluation
from agl_server.training.loop import Trainer, uninterrupted
from agl_server.training.metrics import SUMMARY_FILE, MetricsLog, Observer, Summary
from agl_server.training.session import Session, first_look, open_session


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
    """Train in `run_dir`; returns the result, also when interrupted. A new run's folder is removed if it cannot start.

    With `resume`, the run goes on from `checkpoint`, by default its last one, and what came after it is superseded.
    With a `source` of rollouts on its server, an engine that is lost is started again, and the source goes on.
    With `look`, a new run begins with a rollout of the agent that is shown; TrainingError if none that is tried ends
    well. ConfigError if a changed setting does not fit the checkpoint; StoreError if the run's store is empty.
    """
    config = loaded.config
    if not os.access(run_dir, os.W_OK):
        raise CheckpointError(
            f"The run's folder {run_dir} cannot be written, so that the run cannot go on. Check its permissions and "
            f"the disk, or go on with a copy of the folder."
        )
    checkpoints = Checkpoints(run_dir / CHECKPOINTS, config.train.keep_checkpoints)
    async with AsyncExitStack() as stack:
        begun = stack.enter_context(removed_unless_begun(None if resume else run_dir))
        weights = checkpoint or (checkpoints.latest() if resume and checkpoints.all() else None)
        state = read_state(weights) if weights else RunState()
        resolved = config.model_dump(mode="json")
        if weights is not None:
            for change in check_changes(state.config, resolved, config.folder, weights):
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
                if look and not resume:
                    try:
                        await _look(session, observer, run_dir, begun)
                    except EngineError:
                        begun()  # The agent is not at fault, and the error says how to resume.
                        raise
                begun()
                observer.begun()
                private.make_folder(checkpoints.folder, exist_ok=True)
                (run_dir / SUMMARY_FILE).unlink(missing_ok=True)  # Without one, a run that is over has died.
                log.restart = session.restart
                log.forget_after(state.step if weights else -1)
                if resume:
                    store_config(config, run_dir)
                    for superseded in checkpoints.forget_after(state.step):
                        observer.say(f"removed {superseded}, which is superseded")
                trainer = trainer_of(
                    loaded,
                    session,
                    checkpoints,
                    log,
                    observer,
                    on_rollouts=alarms_of(loaded),
                    state=state,
                    watch=Watch(
                        settings_of(loaded),
                        tuple(config.policies),
                        [line.values for line in read_metrics(run_dir) if line.kind == "train"],
                    ),
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
                return Summary(
                    run_dir=run_dir,
                    seed=config.seed,
                    state=state,
                    lines=read_metrics(run_dir),
                    stopped_by=stopped_by,
                    checkpoint=checkpoints.all()[-1] if checkpoints.all() else None,
                    best=checkpoints.best(),
                    problems=dict(session.workers.problems) if session.workers else {},
                    samples=source is not None or not isinstance(session.tasks["train"], RecordedTasks),
                )


async def evaluate(
    loaded: LoadedConfig, run_dir: Path, checkpoint: Path | None, observer: Observer, *, repeat: int = 1
) -> Evaluation:
    """Evaluate a checkpoint (None: the initial weights) on every held-out set, sampled tasks `repeat` times.

    The records of later steps stay as they are. The folder of a new run is removed if it cannot be started.
    """
    step = read_state(checkpoint).step if checkpoint else 0
    with removed_unless_begun(run_dir) as begun:
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


async def _look(session: Session, observer: Observer, run_dir: Path, begun: Callable[[], None]) -> None:
    """Show the agent's first rollout. TrainingError if it and all others that are tried fail in the same way."""
    look = await first_look(session, observer)
    for _, rollout in look.seen:
        observer.say(f"first look: {rollout}")
    if look.fault is None:
        return
    why, following = "The agent does not work yet, so training", "Try it with `agl doctor CONFIG`"
    if look.are_answered:
        begun()  # The rollouts are kept.
        why, following = (
            "Training",
            f"See them: agl rollouts {run_dir}; train all the same: agl train --resume {run_dir}",
        )
    raise TrainingError(
        f"{why} did not begin: {look.fault.seen}. {look.fault.remedy} {look.fault.details}\n{following}."
    )


async def _until_done(trainer: Trainer, observer: Observer) -> signal.Signals | None:
    """Train; on Ctrl-C or SIGTERM stop at once, save what was learned, and return the signal."""
    try:
        stopped_by = await until_signal(trainer.train())
        if stopped_by is not None:
            observer.say("stopping; saving a checkpoint")
            if trainer.state.step > trainer.saved_step:
                await uninterrupted(trainer.checkpoint())
        return stopped_by
    finally:
        trainer.count_time()


def new_run_dir(loaded: LoadedConfig) -> Path:
    """`runs/NAME`, or `runs/NAME-2` and so on if it is taken; holds the configuration as resolved."""
    base = loaded.config.runs / loaded.config.name
    return first_free(base, partial(store_config, loaded.config))


def first_free(base: Path, write: Callable[[Path], None]) -> Path:
    """Make the folder `base`, or `base-2` and so on if it is taken, with the configuration that `write` puts there."""
    for number in range(1, 10_000):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if folder.is_dir() and all(file.suffix == ".log" for file in folder.iterdir()):  # A start failed.
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(FileExistsError):
            make_run_dir(folder, write, may_exist=False)
            return folder
    raise CheckpointError(f"{base} and thousands of folders beside it are taken. Remove some or set `name`.")


def make_run_dir(folder: Path, write: Callable[[Path], None], *, may_exist: bool = True) -> None:
    """Make a run's folder and `write` its configuration; FileExistsError if it exists, unless it `may_exist`."""
    try:
        private.make_folder(folder, exist_ok=may_exist)
        write(folder)
    except OSError as error:
        if isinstance(error, FileExistsError) and not may_exist:
            raise
        raise ConfigError(
            f"The run's folder {folder} cannot be made or written ({error.strerror}: {error.filename}). Check the "
            f"permissions and the disk, or have runs elsewhere: --set runs=FOLDER."
        ) from error


@contextmanager
def removed_unless_begun(folder: Path | None) -> Iterator[Callable[[], None]]:
    """Remove a new run's folder, where only a configuration is, if the block fails before it calls what it gets.

    If the engine left a log, which its errors name, the log stays until a run takes the name.
    """
    has_begun = folder is None or any(file.name != CONFIG_FILE for file in folder.iterdir())

    def begun() -> None:
        nonlocal has_begun
        has_begun = True

    try:
        yield begun
    except BaseException:
        if folder is not None and not has_begun:
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.suffix != ".log" or not path.stat().st_size:
                    path.unlink()
            with suppress(OSError):  # A log stays.
                folder.rmdir()
        raise


@asynccontextmanager
async def local_server(
    loaded: LoadedConfig, run_dir: Path, source_of: SourceFactory | None = None
) -> AsyncIterator[LightningServer]:
    """The server and the store of a run. If the block ends by an error, workers wait until the run is resumed.

    StoreError if the store is empty, and the file in the run's folder says that a run was begun.
    """
    file = run_dir / SERVER_FILE
    before = ServerFile.read(file)
    keys = replace(Keys.of_run(file), passthrough=passthrough_key(loaded.config.gateway))
    async with loaded.store.build(run_dir) as store:
        begun = bool(await store.runs())
        if not begun and before is not None and before.begun:
            raise StoreError(
                f"The store {run_dir / 'store.sqlite'} is empty, but {file} says that a run was begun: what was "
                f"recorded of it is lost, or is elsewhere. Put the store back, with its log (-wal) if it has one, or "
                f"restore a backup. To start a new run, remove {file}."
            )
        source, config = None if source_of is None else await source_of(store, keys), loaded.config
        server = LightningServer(
            store,
            None,
            run_settings(config),
            loaded.plugins.hook,
            listen=config.server,
            gateway=config.gateway,
            keys=keys,
            source=source,
        )
        await server.start(None if before is None else urlsplit(before.base_url).port)
        ended_well = False
        try:
            keys.write(file, server.base_url, begun=begun or source is not None)
            yield server
            ended_well = True
        finally:
            await server.stop(over=ended_well)


def passthrough_key(gateway: GatewaySection) -> str | None:
    """The key for what is passed through, taken out of the environment."""
    return take_key_of("gateway.passthrough.api_key_env", gateway.passthrough.api_key_env)


def run_settings(config: RunConfig) -> RunSettings:
    return RunSettings(
        sampling=config.sampling,
        seed=config.seed,
        timeout=config.workers.timeout,
        attempts=config.workers.attempts,
        agents={name: policy.agents for name, policy in config.policies.items()},
        prompts=config.prompts,
    )
