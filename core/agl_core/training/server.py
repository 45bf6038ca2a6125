"""A run's folder, and the server that works in it: how both are made, and how a restart of the run begins."""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from agl_core import private
from agl_core.config.load import CONFIG_FILE, LoadedConfig, store_config
from agl_core.config.models import GatewaySection, RunConfig
from agl_core.errors import CheckpointError, ConfigError, ServerError, StoreError
from agl_core.server import Keys, LightningServer
from agl_core.server.keys import RolloutSource, SourceFactory
from agl_core.server.upstream import RunSettings
from agl_core.store.interface import Store
from agl_core.types import Run
from agl_core.wire import SERVER_FILE, ServerFile, take_key_of


def new_run_dir(loaded: LoadedConfig) -> Path:
    """`runs/NAME`, or `runs/NAME-2` and so on if it is taken; holds the configuration as resolved."""
    base = loaded.config.runs / loaded.config.name
    return first_free(base, partial(store_config, loaded.config))


def first_free(base: Path, write: Callable[[Path], None]) -> Path:
    """Make the folder `base`, or `base-2` and so on if it is taken, with the configuration that `write` puts there.

    A folder with nothing but logs is what a failed start left, and is taken over.
    """
    for number in range(1, 10_000):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if folder.is_dir() and all(file.suffix == ".log" for file in folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(FileExistsError):
            make_run_dir(folder, write, may_exist=False)
            return folder
    raise CheckpointError(f"{base} and thousands of folders beside it are taken. Remove some or set `name`.")


def make_run_dir(folder: Path, write: Callable[[Path], None], *, may_exist: bool = True) -> None:
    """Make a run's folder and have `write` put its configuration there.

    FileExistsError if the folder exists, unless `may_exist`.
    """
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


def is_new(run_dir: Path) -> bool:
    """True if a run's folder has nothing but its configuration."""
    return all(file.name == CONFIG_FILE for file in run_dir.iterdir())


@contextmanager
def removed_unless_begun(folder: Path | None) -> Iterator[Callable[[], None]]:
    """Remove a new run's folder if the block fails before it calls the function that it gets: nothing is in it yet.

    If the engine left a log, which its errors name, the log stays until a run takes the name. None: there is nothing to
    remove.
    """
    has_begun = False

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
    """The server and the store of a run, in this process; they end with it.

    `source_of` makes what opens rollouts from outside, if anything does.

    Workers on this machine find it by the file in the run's folder. If the block ends by an error, they wait until the
    run is resumed.
    """
    file = run_dir / SERVER_FILE
    keys = replace(Keys.of_run(file), passthrough=passthrough_key(loaded.config.gateway))
    async with loaded.store.build(run_dir) as store:
        begun = await _has_begun(store, file)
        source = None if source_of is None else await source_of(store, keys)
        server = await _started(loaded, store, keys, file, source)
        ended_well = False
        try:
            keys.write(file, server.base_url, begun=begun or source is not None)
            yield server
            ended_well = True
        finally:
            await server.stop(over=ended_well)


async def begin_restart(server: LightningServer, config: RunConfig, run_dir: Path, resumed_step: int | None) -> Run:
    """Begin the run's next restart, which goes on from the checkpoint of `resumed_step`; None: from none.

    The run has the name in its store, so that its folder may be moved; at first it has that of its folder.
    """
    runs = await server.store.runs()
    name = runs[-1].id if runs else run_dir.name
    restart = 1 + max((run.restart for run in runs if run.id == name), default=-1)
    run = Run(name, restart, time.time(), config.model_dump(mode="json"), resumed_step if restart else None)
    await server.begin(run)
    server.keys.write(run_dir / SERVER_FILE, server.base_url, begun=True)
    return run


async def _has_begun(store: Store, file: Path) -> bool:
    """True if the store has a run. StoreError if it has none, but the file of an earlier server names one."""
    if await store.runs():
        return True
    before = ServerFile.read(file)
    if before is not None and before.begun:
        raise StoreError(
            f"The store {file.with_name('store.sqlite')} is empty, but {file} says that a run was begun: what "
            f"was recorded of it is lost, or is elsewhere. Put the store back, with its log (-wal) if it has one, or "
            f"restore a backup. To start a new run, remove {file}."
        )
    return False


async def _started(
    loaded: LoadedConfig, store: Store, keys: Keys, file: Path, source: RolloutSource | None
) -> LightningServer:
    """A server that listens; with port 0 where the one before did, if it can, so that others find it again."""
    settings = loaded.config.server

    async def listening(port: int) -> LightningServer:
        server = LightningServer(
            store,
            None,
            run_settings(loaded.config),
            loaded.plugins.hook,
            listen=settings.model_copy(update={"port": port}),
            keys=keys,
            gateway=loaded.config.gateway,
            source=source,
        )
        await server.start()
        return server

    before = ServerFile.read(file)
    if not settings.port and before is not None and (port := urlsplit(before.base_url).port):
        with suppress(ServerError):
            return await listening(port)
    return await listening(settings.port)


def passthrough_key(gateway: GatewaySection) -> str | None:
    """The key for what is passed through, taken out of the environment."""
    return take_key_of("gateway.passthrough.api_key_env", gateway.passthrough.api_key_env)


def run_settings(config: RunConfig) -> RunSettings:
    """How the rollouts of a run are sampled and tried."""
    return RunSettings(
        sampling=config.sampling,
        seed=config.seed,
        timeout=config.workers.timeout,
        attempts=config.workers.attempts,
        agents={name: policy.agents for name, policy in config.policies.items()},
    )
