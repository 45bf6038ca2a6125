"""The model servers of sessions: one, or versions of the run, loaded and swapped without dropping a call."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

from agl_core import private
from agl_core.apis.errors import no_upstream
from agl_core.config.load import LoadedConfig
from agl_core.errors import AglError, EngineError
from agl_core.protocols import Engine, Upstream
from agl_online.policies import Version, make_engine, policy_spec
from agl_online.versions import Ledger, VersionsNow
from agl_server.gateway.attempts import Destination, Relay, RunSettings
from agl_server.training.checkpoints import CHECKPOINTS, Checkpoints
from agl_server.training.run import run_settings

logger = logging.getLogger(__name__)

_FOLDER = "deployed"
"""In the run's folder: the log of the engine that serves."""


def fixed_upstream(upstream: Upstream, settings: RunSettings) -> Relay:
    """A model server that answers all sessions; `disconnect` closes its connections."""
    relay = Relay()
    # What does not return ids may be a hosted API, which refuses settings that it does not know.
    relay.connect(upstream, settings if upstream.returns_ids else replace(settings, sampling=None))
    return relay


class DeployedVersions(Relay):
    """Answers sessions by the versions that the run's ledger names: the stable one, and for a share the canary.

        async with DeployedVersions(run_dir, loaded, share=0.1).running() as deployed:
            async with local_server(loaded, run_dir, sessions_of(loaded, run_dir, deployed, say)) as server:
                await deployed.refresh()  # after each decision, and from time to time

    A canary answers `share` of the names of sessions, and the stable version all the others. A promotion or rollback
    reaches open sessions at their next call. A recorded call's version is the step of the version that answered it.
    The versions have an engine of their own, so that training and serving never wait for each other.
    """

    def __init__(self, run: Path, loaded: LoadedConfig, share: float, say: Callable[[str], None] = logger.info) -> None:
        super().__init__()
        self._run, self._config, self._share, self._say = run, loaded, share, say
        [self._policy] = loaded.config.policies
        self._settings = run_settings(loaded.config)
        self._ledger = Ledger(run)
        self._versions = VersionsNow()
        self._engine: Engine | None = None
        self._loaded: set[int] = set()
        """The versions that the engine has, by their steps."""
        self._calls: Counter[int] = Counter()
        """Calls that a version is answering: until they end, it is kept."""
        self._refreshing = asyncio.Lock()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Start the engine and load what is stable; an AglError says why that cannot be."""
        try:
            await self._refresh()
            yield self
        finally:
            await self._stop()

    async def refresh(self) -> None:
        """Serve what the ledger says now, by a new engine if it was lost. Errors are logged, and serving goes on."""
        async with self._refreshing:
            try:
                if self._engine is not None:
                    await self._engine.versions()
            except EngineError as error:
                logger.error("The engine that answers sessions was lost, and is started again: %s", error)
                await self._stop()
            try:
                await self._refresh()
            except AglError as error:
                logger.error(
                    "Sessions are answered as before, because what the ledger says cannot be served: %s", error
                )

    @contextmanager
    def acquire_destination(self, group: str) -> Iterator[Destination]:
        """The version that answers a session; it stays loaded until the block ends."""
        served = self.current_destination()
        version = self._version_of(group)
        upstream = replace(served.upstream, models={self._policy: _model(version)})
        self._calls[version] += 1
        try:
            yield Destination(upstream, served.settings, served.client, {self._policy: version})
        finally:
            self._calls[version] -= 1

    def _version_of(self, group: str) -> int:
        """The version for a name's sessions now; ApiError 503 if none is loaded."""
        stable, canary = self._versions.stable, self._versions.canary
        if canary in self._loaded and is_drawn(group, canary, self._share):
            return canary
        if stable not in self._loaded:
            raise no_upstream()
        return stable

    async def _start(self) -> Engine:
        folder = self._run / _FOLDER
        private.make_folder(folder, exist_ok=True)
        engine = self._engine = make_engine(self._config, folder)
        upstream = await engine.start()
        self.connect(replace(upstream, models={self._policy: self._policy}), self._settings)
        return engine

    async def _stop(self) -> None:
        engine, self._engine = self._engine, None
        self._loaded.clear()
        self.disconnect()
        if engine is not None:
            await engine.stop()

    async def _refresh(self) -> None:
        """Start the engine if there is none; load what is new, then let sessions have it, then let go of the others."""
        engine = self._engine or await self._start()
        versions = await asyncio.to_thread(self._ledger.current)
        if versions.stable is None:
            raise EngineError(f"No version is stable in {self._run}: call Ledger.begin first.")
        await self._load(engine, versions.stable)
        if versions.canary is not None:
            try:
                await self._load(engine, versions.canary)
            except AglError as error:
                logger.error("The canary, version %s, cannot be loaded: %s", versions.canary, error)
        self._versions = versions
        for step in sorted(self._loaded - set(versions.serving)):
            if not self._calls[step]:
                self._loaded.remove(step)
                await engine.unload_policy(_model(step))
                self._say(f"version {step} is no longer served")

    async def _load(self, engine: Engine, step: int) -> None:
        if step not in self._loaded:
            checkpoint = Checkpoints(self._run / CHECKPOINTS, keep=1).meant_by(str(step))
            version = Version(self._run, self._policy, step, checkpoint)
            spec = await asyncio.to_thread(policy_spec, version, self._config)
            await engine.load_policy(_model(step), spec)
            self._loaded.add(step)
            self._say(f"version {step} is served")


def _model(step: int) -> str:
    return f"version-{step}"


def is_drawn(group: str, canary: int, share: float) -> bool:
    """True if a canary answers a name's sessions. `group` is made with a secret: no user can choose the version."""
    digest = hashlib.blake2b(f"{canary}/{group}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * (1 << 64)
