"""The versions that answer sessions: loaded, assigned to sessions, and swapped without dropping a call."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from agl_core import private
from agl_core.config.models import RunConfig
from agl_core.errors import AglError, EngineError
from agl_core.plugins import Plugins
from agl_core.protocols import Engine, Upstream
from agl_core.server.attempt import ActiveAttempt
from agl_core.server.errors import ApiError, no_upstream
from agl_core.server.upstream import Destination, UpstreamClient
from agl_core.training.server import run_settings
from agl_online.canary import Outcome
from agl_online.ledger import Ledger, Standing, State
from agl_online.policies.engines import Source
from agl_online.policies.naming import Reference, called
from agl_online.policies.shelf import Served, Shelf, Wanted
from agl_online.session import ActiveSession

logger = logging.getLogger(__name__)

_FOLDER = "deployed"
"""In the run's folder: the log of the engine that serves."""
_MOST = 4
"""Versions of a policy that are loaded at once, at most; sessions of older ones go on with the stable one."""
_REMEMBERED = 10_000
"""Sessions with failed calls that are remembered."""


class DeployedVersions:
    """Answers sessions by the versions that the run's ledger names: the stable one, and for a share the canary.

        async with DeployedVersions(run_dir, config, share=0.1) as deployed:
            async with local_server(loaded, run_dir, sessions_of(loaded, run_dir, deployed, say)) as server:
                await deployed.refresh()  # after each decision, and from time to time

    A session keeps its version until it ends, also when another one is promoted. It goes on with the stable one if its
    version is rolled back, or is not loaded any more. A pinned version answers all sessions; a canary gets `share` of
    the new ones. The version of a recorded call is the step of the version that answered it.

    The versions have an engine of their own, so that what trains never waits for them, nor they for it. The policies
    need a stable version each (`Ledger.begin`). Used from the server's event loop.
    """

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        share: float,
        say: Callable[[str], None] = logger.info,
        plugins: Plugins | None = None,
    ) -> None:
        self._run, self._config, self._share, self._say = run, config, share, say
        self._ledger = Ledger.of_run(run)
        self._source = Source.of(run, plugins=plugins)
        self._standings: dict[str, Standing] = {}
        self._sessions: dict[str, ActiveSession] = {}
        """Those that have a version."""
        self._failed: dict[str, Outcome] = {}
        self._engine: Engine | None = None
        self._shelf: Shelf | None = None
        self._destination: Destination | None = None
        self._refreshing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Start the engine and load what is stable; an AglError says why that cannot be."""
        try:
            await self._start()
            await self._refresh()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    @property
    def failed(self) -> list[Outcome]:
        """Sessions of which calls failed, for the model did not answer; the newest last, since the start."""
        return list(self._failed.values())

    @property
    def loaded(self) -> list[str]:
        """The versions that are loaded, by name."""
        return [] if self._shelf is None else sorted({str(each.version) for each in self._shelf.names.values()})

    async def refresh(self) -> None:
        """Serve what the ledger says now; the engine is started anew if it was lost.

        What goes wrong is logged, and what was served stays.
        """
        async with self._refreshing:
            try:
                if self._engine is not None:
                    await self._engine.versions()
            except EngineError as error:
                logger.error("The engine that answers sessions was lost, and is started again: %s", error)
                await self._stop()
            try:
                if self._engine is None:
                    await self._start()
                await self._refresh()
            except AglError as error:
                logger.error(
                    "Sessions are answered as before, because what the ledger says cannot be served: %s", error
                )

    def served(self) -> Destination:
        """The engine; ApiError 503 while it is not there."""
        if self._destination is None:
            raise no_upstream()
        return self._destination

    @contextmanager
    def answering(self, attempt: ActiveAttempt) -> Iterator[Destination]:
        """The versions that answer a session; they stay loaded until the block ends."""
        assert isinstance(attempt, ActiveSession)
        served = self.served()
        chosen = {policy: self._of(attempt, standing) for policy, standing in self._standings.items()}
        self._sessions[attempt.id] = attempt
        models = {policy: each.model for policy, each in chosen.items()}
        upstream = Upstream(served.upstream.urls, models, served.upstream.api_key)
        versions = {policy: each.version.step for policy, each in chosen.items()}
        with ExitStack() as stack:
            for each in chosen.values():
                stack.enter_context(each.answering())
            try:
                yield Destination(upstream, served.settings, served.client, versions)
            except ApiError as error:
                if error.status >= 500:
                    self._count_failure(attempt, versions)
                raise

    def _of(self, session: ActiveSession, standing: Standing) -> Served:
        """What answers a session of a policy, from now on; ApiError 503 if nothing does."""
        before = session.versions.get(standing.policy)
        stable = self._found(standing.policy, standing.serving[0])
        found: Served | None = None
        if standing.pinned is not None:
            found = stable
        elif before is None:
            drawn = standing.canary is not None and is_drawn(session.rollout.group, standing.canary, self._share)
            found = self._found(standing.policy, standing.canary) if drawn else None
        elif standing.state(before) is not State.ROLLED_BACK:
            found = self._found(standing.policy, before)
        found = found or stable
        if found is None:
            raise no_upstream()
        session.versions[standing.policy] = found.version.step
        return found

    def _found(self, policy: str, step: int | None) -> Served | None:
        assert self._shelf is not None
        return None if step is None else self._shelf.names.get(str(self._reference(policy, step)))

    def _reference(self, policy: str, step: int) -> Reference:
        return Reference(self._run, policy, called(self._run, policy), str(step))

    def _count_failure(self, session: ActiveSession, versions: dict[str, int]) -> None:
        for policy, version in versions.items():
            key = f"{policy}/{session.id}"
            self._failed[key] = Outcome(version, session.rollout.group, None, lost=True)
        while len(self._failed) > _REMEMBERED:
            del self._failed[next(iter(self._failed))]

    async def _start(self) -> None:
        folder = self._run / _FOLDER
        private.make_folder(folder, exist_ok=True)
        self._engine = self._source.engine(folder)
        upstream = await self._engine.start()
        self._shelf = Shelf(self._engine, (), {self._run: self._source}, self._say)
        settings = run_settings(self._config)
        names = {policy: policy for policy in self._config.policies}
        client = UpstreamClient(upstream, settings.timeout)
        self._destination = Destination(Upstream(upstream.urls, names, upstream.api_key), settings, client, {})

    async def _stop(self) -> None:
        destination, self._destination = self._destination, None
        engine, self._engine, self._shelf = self._engine, None, None
        if destination is not None:
            destination.client.close()
        if engine is not None:
            await engine.stop()

    async def _refresh(self) -> None:
        """Load what is new, then let sessions have it, then let go of what none of them has."""
        await asyncio.to_thread(self._ledger.settle)
        standings = {policy: await asyncio.to_thread(self._ledger.current, policy) for policy in self._config.policies}
        for policy, standing in standings.items():
            if standing.stable is None:
                raise EngineError(f"No version of '{policy}' is stable in {self._run}: call Ledger.begin first.")
        await self._load(standings, loaded=True)
        self._standings = standings
        await self._load(standings, loaded=False)

    async def _load(self, standings: dict[str, Standing], *, loaded: bool) -> None:
        """Have the shelf hold what serves, and what is loaded already, or else what open sessions have."""
        shelf = self._shelf
        assert shelf is not None
        wanted = [
            Wanted(self._reference(policy, step), required=place == 0)
            for policy, standing in standings.items()
            for place, step in enumerate(standing.serving)
        ]
        names = {str(each.reference) for each in wanted}
        for policy, standing in standings.items():
            also = self._loaded_steps(policy) if loaded else self._held(policy, standing)
            references = (self._reference(policy, step) for step in also)
            wanted += [Wanted(each, required=False) for each in references if str(each) not in names]
        shelf.wanted = wanted
        await shelf.refresh()
        missing = names - shelf.names.keys()
        if missing:
            logger.error("The canary %s cannot be loaded: %s", *next(iter(shelf.problems.items())))

    def _loaded_steps(self, policy: str) -> Collection[int]:
        assert self._shelf is not None
        return {each.version.step for each in self._shelf.names.values() if each.version.policy == policy}

    def _held(self, policy: str, standing: Standing) -> Collection[int]:
        """The versions that open sessions have and keep, the newest few."""
        self._sessions = {id: each for id, each in self._sessions.items() if not each.closed}
        if standing.pinned is not None:
            return ()
        held = {each.versions[policy] for each in self._sessions.values() if policy in each.versions}
        held &= {*self._loaded_steps(policy)} - {*standing.serving}
        kept = sorted((step for step in held if standing.state(step) is not State.ROLLED_BACK), reverse=True)
        return kept[: _MOST - len(standing.serving)]


def is_drawn(group: str, canary: int, share: float) -> bool:
    """Whether a canary answers the sessions of a name: the same for all of them, drawn anew for each canary.

    `group` stands for the name. It is made with the server's secret, so that no user can choose the version.
    """
    digest = hashlib.blake2b(f"{canary}/{group}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * (1 << 64)
