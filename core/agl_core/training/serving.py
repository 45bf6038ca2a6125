"""What the trainer needs of a Lightning Server, and the two that it can have: in its own process, or elsewhere."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from agl_core.config.load import ServedConfig
from agl_core.config.models import RunConfig
from agl_core.errors import EngineError, ServerError
from agl_core.protocols import Upstream
from agl_core.server import Keys, LightningServer
from agl_core.server.keys import is_loopback
from agl_core.store.interface import Store
from agl_core.types import Rollout
from agl_core.wire import OPERATOR_KEY, SERVER_FILE, WORKER_KEY, ServerFile
from agl_core.wire.operators import (
    BeginReply,
    BeginRequest,
    FinishRequest,
    Registration,
    RunSettings,
    VersionsRequest,
)


class Queue(Protocol):
    """The rollout queue."""

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Have these run, after those that were added before; adding them again changes nothing."""

    async def done(self, ids: Collection[str]) -> list[Rollout]:
        """Those of `ids` that are done; waits until one is. Asking changes nothing."""

    async def cancel(self, ids: Collection[str]) -> None:
        """End these; they are done as soon as this returns."""


class Serving(Protocol):
    """A Lightning Server as the trainer sees it."""

    @property
    def queue(self) -> Queue:
        """Where rollouts are run."""

    @property
    def store(self) -> Store:
        """Where everything is recorded."""

    async def begin(self, request: BeginRequest) -> BeginReply:
        """Begin the run's next incarnation; what earlier ones left unfinished ends as lost."""

    async def serve(self, registration: Registration) -> None:
        """From now on, rollouts are lent to workers, and their model calls are answered by this engine."""

    async def publish(self, request: VersionsRequest) -> None:
        """Policies were updated."""

    async def finish(self, request: FinishRequest) -> None:
        """The trainer stops: rollouts wait for the next one, unless the run is over, which workers are told."""


@asynccontextmanager
async def near_server(loaded: ServedConfig, run_dir: Path) -> AsyncIterator[LightningServer]:
    """The server and the store of a run, in the trainer's own process; they end with it.

    Workers on this machine find it by the file in the run's folder, which also tells those that are away that the run
    is over. If it ends by an error, they wait for the run to be resumed.
    """
    file = run_dir / SERVER_FILE
    keys = Keys.of_run(file)
    keys.check_host(loaded.config.server.host)
    async with loaded.store.build(run_dir) as store:
        server = _server(loaded, store, keys, loaded.config.server.port)
        await server.start()
        failed = True
        try:
            keys.write(file, server.base_url)
            yield server
            failed = False
            if server.run.over:
                keys.write(file, server.base_url, over=True)
        finally:
            await server.stop(over=not failed)


@asynccontextmanager
async def server_apart(loaded: ServedConfig, run_dir: Path) -> AsyncIterator[LightningServer]:
    """The server and the store of a run, for a trainer elsewhere; what an earlier server left there is taken up.

    With port 0 it listens where that one did, if it can, so that those who wait for it find it again.
    """
    host, port = loaded.config.server.host, loaded.config.server.port
    file = run_dir / SERVER_FILE
    keys = Keys.of_run(file)
    keys.check_host(host, (WORKER_KEY, OPERATOR_KEY))
    async with loaded.store.build(run_dir) as store:
        server = _server(loaded, store, keys, port or _port_before(file), run_dir.name)
        try:
            await server.start()
        except ServerError:
            if port:
                raise
            server = _server(loaded, store, keys, 0, run_dir.name)
            await server.start()
        try:
            keys.write(file, server.base_url)
            yield server
        finally:
            await server.stop(over=False)


def _server(loaded: ServedConfig, store: Store, keys: Keys, port: int, run: str | None = None) -> LightningServer:
    return LightningServer(
        store,
        None,
        **dict(run_settings(loaded.config)),
        **{**loaded.config.server.model_dump(), "port": port},
        hook=loaded.plugins.hook,
        keys=keys,
        run=run,
    )


def _port_before(file: Path) -> int:
    """The port of the server that wrote this file; 0 if there was none."""
    try:
        return urlsplit(ServerFile.model_validate_json(file.read_bytes()).base_url).port or 0
    except (OSError, ValueError):
        return 0


def run_settings(config: RunConfig) -> RunSettings:
    """How the rollouts of a run are sampled and tried."""
    return RunSettings(
        sampling=config.sampling,
        seed=config.seed,
        timeout=config.workers.timeout,
        attempts=config.workers.attempts,
        agents={name: policy.agents for name, policy in config.policies.items()},
    )


def registration(
    config: RunConfig, incarnation: int, upstream: Upstream, versions: dict[str, int], expires: float | None
) -> Registration:
    """What a server has to know of a trainer's engine."""
    return Registration(
        incarnation=incarnation,
        urls=upstream.urls,
        models=dict(upstream.models),
        api_key=upstream.api_key,
        returns_ids=upstream.returns_ids,
        context_length=upstream.context_length,
        versions=versions,
        settings=run_settings(config),
        expires=expires,
    )


def check_reachable(upstream: Upstream, server_url: str) -> None:
    """EngineError if the engine listens to this machine alone, and the server is on another one."""
    server = urlsplit(server_url).hostname or ""
    for url in upstream.urls:
        if is_loopback(urlsplit(url).hostname or "") and not _is_here(server):
            raise EngineError(
                f"The engine serves at {url}, which the Lightning Server at {server_url} cannot reach: that is another "
                f"machine. Have the engine listen at this machine's own address, where it has a setting for that: "
                f'[engine.torch] host = "ADDRESS".'
            )


def _is_here(host: str) -> bool:
    """Whether a host is this machine: only its own addresses can be listened at."""
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
