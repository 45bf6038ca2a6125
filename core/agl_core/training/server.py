"""The Lightning Server as the trainer sees it, and how a run's server is started."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from agl_core.config.load import ServerConfig
from agl_core.config.models import GatewaySection, RunConfig
from agl_core.errors import ConfigError, EngineError, ServerError, StoreError
from agl_core.protocols import Upstream
from agl_core.server import Keys, LightningServer
from agl_core.server.gateway.upstream import Answering
from agl_core.server.keys import is_loopback
from agl_core.server.sessions.sessions import Online
from agl_core.store.interface import SessionStore, Store
from agl_core.types import Rollout, Run
from agl_core.wire import trainers as wire
from agl_core.wire.keys import OPERATOR_KEY, SERVER_FILE, WORKER_KEY, ServerFile, problem_of_key, take_key


class Queue(Protocol):
    """The rollout queue."""

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Add these rollouts after those that were added before; adding them again changes nothing."""

    async def done(self, ids: Collection[str]) -> list[Rollout]:
        """Those of `ids` that are done; waits until one is. Asking changes nothing."""

    async def cancel(self, ids: Collection[str]) -> None:
        """End these; they are done when this returns."""


class RunControl(Protocol):
    """The run that a server serves, as its trainer controls it."""

    @property
    def queue(self) -> Queue:
        """Runs the rollouts."""

    @property
    def store(self) -> Store:
        """Records everything."""

    async def begin(self, request: wire.BeginRequest) -> wire.BeginReply:
        """Begin the run's next restart; what earlier ones left unfinished ends as lost."""

    async def serve(self, registration: wire.Registration) -> None:
        """From now on, workers lease rollouts, and this engine answers their model calls."""

    async def publish(self, request: wire.VersionsRequest) -> None:
        """Policies were updated."""

    async def finish(self, request: wire.FinishRequest) -> None:
        """The trainer stops: rollouts wait for the next one. If the run is over, workers end."""

    async def activity(self) -> wire.Activity:
        """What the rollouts wait for."""

    def check(self) -> None:
        """ServerError if the server no longer hears this trainer."""


class TrainingServer(Protocol):
    """A Lightning Server as the trainer sees it, in its own process (`local_server`) or elsewhere (`RemoteServer`)."""

    @property
    def base_url(self) -> str:
        """Where it listens."""

    @property
    def worker_key(self) -> str | None:
        """The workers' key; None: the trainer does not have it, and starts no worker of its own."""

    @property
    def run(self) -> RunControl:
        """The run that it serves."""


def local_server(
    loaded: ServerConfig, run_dir: Path, deployed: Answering | None = None
) -> AbstractAsyncContextManager[LightningServer]:
    """The server and the store of a run, in the trainer's own process; they end with it.

    With `[online]` and `deployed`, which chooses the versions that answer, it also records real use.

    Workers on this machine find it by the file in the run's folder, which also says whether the run is over. If the
    trainer ends by an error, workers wait until the run is resumed.
    """
    return _server(loaded, run_dir, deployed, standalone=False)


def standalone_server(
    loaded: ServerConfig, run_dir: Path, upstream: Upstream | None = None
) -> AbstractAsyncContextManager[LightningServer]:
    """The server and the store of a run, for a trainer elsewhere; it goes on where an earlier server left off.

    With `[online]` it also records real use, which `upstream` answers. ConfigError if the store cannot do that.
    """
    return _server(loaded, run_dir, upstream, standalone=True)


@asynccontextmanager
async def _server(
    loaded: ServerConfig, run_dir: Path, answering: Upstream | Answering | None, *, standalone: bool
) -> AsyncIterator[LightningServer]:
    file = run_dir / SERVER_FILE
    keys = replace(Keys.of_run(file), passthrough=passthrough_key(loaded.config.gateway))
    keys.check_host(loaded.config.server.host, (WORKER_KEY, OPERATOR_KEY) if standalone else (WORKER_KEY,))
    async with loaded.store.build(run_dir) as store:
        begun = await _has_begun(store, file)
        run, online = await recorded_name(store, run_dir) if standalone else None, None
        if answering is not None:
            keys, run, online = await _online(loaded, store, keys, run_dir, answering)
            begun |= standalone
        server = await _started(loaded, store, keys, file, run=run, online=online)
        ends_run = False
        try:
            keys.write(file, server.base_url, begun=begun)
            yield server
            ends_run = not standalone
            if ends_run and server.run.over:
                keys.write(file, server.base_url, begun=True, over=True)
        finally:
            await server.stop(over=ends_run)


async def _online(
    loaded: ServerConfig, store: Store, keys: Keys, run_dir: Path, upstream: Upstream | Answering
) -> tuple[Keys, str, Online]:
    """What a server needs to record real use: keys with its applications, the run's name, how it is answered."""
    settings = loaded.config.online
    assert settings is not None, "it was checked"
    _check_store(store, loaded.config.store.name)
    run = await recorded_name(store, run_dir)
    if not await store.runs():
        await store.put(Run(run, 0, time.time(), loaded.config.model_dump(mode="json")))
    redactors = tuple(chosen.build() for chosen in loaded.redactors.values())
    return replace(keys, applications=settings.applications), run, Online(settings, upstream, run, run_dir, redactors)


async def recorded_name(store: Store, run_dir: Path) -> str:
    """The run's name: the one in its store, so that its folder may be moved; at first that of its folder."""
    runs = await store.runs()
    return runs[-1].id if runs else run_dir.name


async def _has_begun(store: Store, file: Path) -> bool:
    """Whether the store has a run; StoreError if it has none, but the file of an earlier server names one."""
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


async def _started(loaded: ServerConfig, store: Store, keys: Keys, file: Path, **options: Any) -> LightningServer:
    """A server that listens; with port 0 where the one before did, if it can, so that others find it again."""
    wanted = loaded.config.server.port
    *earlier, last = (wanted,) if wanted else (_port_before(file), 0)
    for port in earlier:
        with suppress(ServerError):
            return await _listening(loaded, store, keys, file, port, options)
    return await _listening(loaded, store, keys, file, last, options)


async def _listening(
    loaded: ServerConfig, store: Store, keys: Keys, file: Path, port: int, options: Mapping[str, Any]
) -> LightningServer:
    server = LightningServer(
        store,
        None,
        run_settings(loaded.config),
        loaded.plugins.hook,
        listen=loaded.config.server.model_copy(update={"port": port}),
        keys=keys,
        gateway=loaded.config.gateway,
        begun=lambda: keys.write(file, server.base_url, begun=True),
        **options,
    )
    await server.start()
    return server


def _check_store(store: Store, name: str) -> None:
    if not isinstance(store, SessionStore):
        raise ConfigError(
            f"[online] needs a store that can remove what it has and take feedback, and '{name}' cannot. Use the store "
            f"'sqlite', or leave [online] out."
        )


def passthrough_key(gateway: GatewaySection) -> str | None:
    """The key for what is passed through, taken out of the environment; ConfigError if its variable is not set."""
    name = gateway.passthrough.api_key_env
    key = None if name is None else take_key(name)
    if name is not None and key is None:
        raise ConfigError(
            f"gateway.passthrough.api_key_env: the environment variable {name} is not set. Set it to the key of the "
            "server that requests are passed through to, or leave api_key_env out."
        )
    problem = None if name is None or key is None else problem_of_key(name, key)
    if problem is not None:
        raise ConfigError(problem)
    return key


def _port_before(file: Path) -> int:
    """The port of the server that wrote this file; 0 if there was none."""
    before = ServerFile.read(file)
    try:
        return 0 if before is None else urlsplit(before.base_url).port or 0
    except ValueError:
        return 0


def run_settings(config: RunConfig) -> wire.RunSettings:
    """How the rollouts of a run are sampled and tried."""
    return wire.RunSettings(
        sampling=config.sampling,
        seed=config.seed,
        timeout=config.workers.timeout,
        attempts=config.workers.attempts,
        agents={name: policy.agents for name, policy in config.policies.items()},
    )


def registration(config: RunConfig, restart: int, upstream: Upstream, versions: dict[str, int]) -> wire.Registration:
    """The registration of a trainer's engine with a server. With a `RemoteServer` it expires unless it is repeated."""
    return wire.Registration(
        restart=restart,
        urls=upstream.urls,
        models=dict(upstream.models),
        api_key=upstream.api_key,
        returns_ids=upstream.returns_ids,
        context_length=upstream.context_length,
        versions=versions,
        settings=run_settings(config),
        expires=None,
    )


def check_reachable(upstream: Upstream, server_url: str) -> None:
    """EngineError if the engine listens on this machine only, and the server is on another one."""
    server = urlsplit(server_url).hostname or ""
    for url in upstream.urls:
        if is_loopback(urlsplit(url).hostname or "") and not _is_here(server):
            raise EngineError(
                f"The engine serves at {url}, which the Lightning Server at {server_url} cannot reach: that is another "
                f"machine. Have the engine listen at this machine's own address, where it has a setting for that: "
                f'[engine.torch] host = "ADDRESS".'
            )


def _is_here(host: str) -> bool:
    """Whether a host is this machine: a process can listen only at the machine's own addresses."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in addresses:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError:
                continue
            return True
    return False
