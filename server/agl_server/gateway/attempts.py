"""Attempts as the gateway sees them: whose a request is, and which model server answers it."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.routing import Route

from agl_core.apis.answered import ReplyCache
from agl_core.apis.errors import ApiError, attempt_closed, no_upstream
from agl_core.capture.requests import HEADER_ROLLOUT
from agl_core.config.models import PromptSection, SamplingSection
from agl_core.protocols import Upstream
from agl_core.store import Store
from agl_core.types import Attempt, AttemptKey, Call, Ending, Mode, Rollout
from agl_server.gateway.upstream import UpstreamClient
from agl_server.http.keys import Keys, attempt_key


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a run's rollouts are sampled, and how often they are tried."""

    sampling: SamplingSection | None
    """None: as agents ask."""
    seed: int
    timeout: float
    """Seconds an attempt may take."""
    attempts: int
    agents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By policy: the agents that it answers."""
    prompts: Mapping[str, PromptSection] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Destination:
    """The model server that answers calls, and how they are sampled."""

    upstream: Upstream
    settings: RunSettings
    client: UpstreamClient
    versions: Mapping[str, int]
    """By policy, for replies that do not name their version."""


class Relay:
    """The current model server, if any; `lend` is told if there is one, since rollouts wait while there is none."""

    def __init__(self, lend: Callable[[bool], None] = lambda lending: None) -> None:
        self.versions: dict[str, int] = {}
        self._lend = lend
        self._destination: Destination | None = None

    @property
    def is_there(self) -> bool:
        return self._destination is not None

    def current_destination(self) -> Destination:
        """ApiError 503 if there is none."""
        if self._destination is None:
            raise no_upstream()
        return self._destination

    @contextmanager
    def acquire_destination(self, group: str) -> Iterator[Destination]:
        """The destination of a call of this group, held until the block ends; ApiError 503 if there is none."""
        yield self.current_destination()

    def connect(self, upstream: Upstream, settings: RunSettings) -> None:
        self.disconnect()
        self._destination = Destination(upstream, settings, UpstreamClient(upstream, settings.timeout), self.versions)
        self._lend(True)

    def disconnect(self) -> None:
        """Refuse new calls; those in flight go on."""
        self._lend(False)
        destination, self._destination = self._destination, None
        if destination is not None:
            destination.client.close()


@dataclass(slots=True, eq=False)
class ActiveAttempt:
    """An attempt that a worker holds; it stays known for a while after its end."""

    rollout: Rollout
    record: Attempt
    closed: bool = False
    """It has ended, or its end is being written: calls no longer count."""
    started_calls: int = 0
    completed_calls: int = 0
    """Calls recorded while it was open."""
    asking: dict[int, float] = field(default_factory=dict)
    """By sequence: when each call began that waits for the model's reply."""
    last_answer: float | None = None
    interrupted: bool = False
    """The server had no model for it, or could not record, which may break its agent."""
    gone_after: int | None = None
    """Completed calls when the model server last failed, or was gone."""
    passed_through: Counter[str] = field(default_factory=Counter)
    """By route: requests passed on and not recorded."""
    context_overflows: int = 0
    last_failure: str | None = None
    answered: ReplyCache = field(default_factory=ReplyCache)
    committing: set[asyncio.Future[Any]] = field(default_factory=set)
    """Calls being written; the end waits for them, so that the store has them first."""
    closing: asyncio.Task[None] | None = None
    reported: Ending | None = None
    answered_by: Relay | None = None
    """None: the run's relay."""
    reply_headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> AttemptKey:
        return self.record.key

    @property
    def mode(self) -> Mode:
        return self.rollout.mode

    def next_sequence(self) -> int:
        """Count a call that begins, and return its place."""
        self.started_calls += 1
        return self.started_calls - 1

    @property
    def refuses_late(self) -> bool:
        """True if its calls are refused once it is closed; sessions refuse none."""
        return self.mode is not Mode.USE

    def call_id(self, prefix: str) -> str:
        return f"{prefix}{os.urandom(16).hex()}"

    async def keep(self, store: Store, *calls: Call) -> None:
        """Record calls, all or none; StoreError."""
        await store.put(*calls)

    async def delivered(self, arrived: bool) -> None:
        """Hook: called after each reply, with whether it reached the client."""

    def forget(self) -> None:
        """Free the memory of an attempt whose end is recorded; who it was and how it ended stays."""
        self.answered.clear()
        self.last_failure = None
        self.rollout = replace(self.rollout, task=replace(self.rollout.task, input=None, metadata={}), prompts={})
        self.record = replace(self.record, result=None, error=None, passed_through=None, bypassed=None)

    def count_failure(self, error: ApiError) -> None:
        """Note an error that the agent got instead of a reply."""
        self.last_failure = error.message
        self.context_overflows += error.is_context_overflow
        self.interrupted |= error.status == 503
        if error.status >= 500:
            self.gone_after = self.completed_calls


class RolloutSource:
    """Opens rollouts of mode `use` beside the queue's; this base opens none. Used on the server's event loop.

    Each rollout has one `ActiveAttempt`, which says what answers its calls and how they are recorded.
    """

    @property
    def routes(self) -> Sequence[Route]:
        return ()

    @property
    def counters(self) -> Mapping[str, int]:
        """Its part of the server's `Activity`."""
        return {}

    async def start(self, base_url: str) -> None:
        """Called before the server listens."""

    async def stop(self) -> None:
        """Called after the server has stopped listening."""

    async def attempt_of(self, request: Request) -> ActiveAttempt | None:
        """The attempt of a model call, open or not; None if the call is not its own. ApiError to refuse it."""
        return None


SourceFactory: TypeAlias = Callable[[Store, Keys], Awaitable[RolloutSource]]


class Attribution:
    """Finds the attempt that a model call or span belongs to: one of the queue or, for calls, of the source."""

    def __init__(
        self,
        keys: Keys,
        known: Mapping[AttemptKey, ActiveAttempt],
        running: Mapping[AttemptKey, ActiveAttempt],
        source: RolloutSource,
    ) -> None:
        self._keys, self._known, self._running, self._source = keys, known, running, source

    async def of(self, request: Request) -> ActiveAttempt:
        """The attempt of a request, open or not, by its key, and by its path or a header if they name one.

        ApiError 401 without that attempt's key, then 400 if path and header differ, 404 if there is no such attempt;
        or the source's.
        """
        opened = await self._source.attempt_of(request)
        return self.leased(request) if opened is None else opened

    async def open(self, request: Request) -> ActiveAttempt:
        """The same; ApiError 410 if it is closed and refuses late calls."""
        attempt = await self.of(request)
        if attempt.closed and attempt.refuses_late:
            raise attempt_closed(*attempt.key)
        return attempt

    def leased(self, request: Request) -> ActiveAttempt:
        """The same, among the queue's attempts."""
        path, header = request.path_params, request.headers.get(HEADER_ROLLOUT)
        in_path = f"{path['rollout']}/{path['attempt']}" if "rollout" in path else None
        name = header if in_path is None else in_path
        if name is None:
            key = self._keys.holder(request, self._running)
        else:
            rollout, _, number = name.rpartition("/")
            named = attempt_key(rollout, number)
            key = self._keys.holder(request, [] if named is None else [named])
        if header not in (None, name):
            raise ApiError(
                400,
                f"The path says {in_path}, but the header {HEADER_ROLLOUT} says {header!r}. Send one of them, or the "
                f"same in both.",
                code="rollout_mismatch",
            )
        attempt = self._known.get(key)
        if attempt is None:
            raise ApiError(
                404,
                f"There is no attempt {key.attempt} of rollout {key.rollout!r} on this server. A request needs the "
                f"rollout and attempt of a lease that is held now; an old base URL does not do.",
                code="rollout_unknown",
            )
        return attempt
