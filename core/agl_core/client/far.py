"""A Lightning Server elsewhere, as a trainer uses it: the same as one in its own process, but for the distance.

While the server is away, everything waits for it and goes on once it is back; one line says so.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from itertools import count
from types import TracebackType
from typing import Any, TypeVar

from agl_core.client.api import BlockingClient, LightningClient, RefusedError, UnreachableError
from agl_core.client.link import Link, persistently
from agl_core.errors import ServerError, StoreError, StoreRefusedError
from agl_core.store.codec import name_of
from agl_core.store.interface import Record
from agl_core.types import Attempt, AttemptKey, Call, Mode, Outcome, Reward, Rollout, RolloutState, Run, Use
from agl_core.wire import AttemptRef
from agl_core.wire.operators import (
    MAX_ATTEMPTS,
    MAX_IDS,
    AttemptsQuery,
    BeginReply,
    BeginRequest,
    FinishRequest,
    RecordsQuery,
    Registration,
    RolloutQuery,
    RolloutsQuery,
    RunsQuery,
    StoreQuestion,
    VersionsRequest,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Kind = TypeVar("Kind", Run, Rollout, Attempt, Call, Outcome, Reward, Use)

_WAIT = 20.0
"""Seconds that one question for what is done waits."""
_CALLS_AT_ONCE = 256
"""Attempts whose calls are asked for in one request: calls are large."""
_TRIES_AT_THE_END = 4
"""What ends is not held up for long by a server that is away."""
_KEEP_ALIVE_TIMEOUT = 10.0
_RETRY = 1.0
_REFUSED = frozenset({413, 422})
"""What the answer is where records, or a question, are wrong as they are."""
_NAMED = 3
"""Records that an error names at most."""


class FarServer:
    """A server at `base_url`, of which `key` is the operator's; see `agl_core.training.serving.Serving`.

    It has to be told now and then that the trainer lives: a thread does that, so that nothing in the trainer's event
    loop can be late with it. `check` raises once another trainer has taken the run over.
    """

    def __init__(self, base_url: str, key: str) -> None:
        self.base_url = base_url
        self._client = LightningClient(base_url, key)
        self._link = Link(base_url)
        self.queue = FarQueue(self._client, self._link)
        self.store = FarStore(self._client, self._link)
        self._presence = _Presence(base_url, key, self._link)

    def check(self) -> None:
        """ServerError if the server no longer hears this trainer."""
        if self._presence.refused is not None:
            raise self._presence.refused

    async def begin(self, request: BeginRequest) -> BeginReply:
        """Begin the run's next incarnation."""
        return await persistently(self._link, lambda: self._client.begin(request))

    async def serve(self, registration: Registration) -> None:
        """Say where the engine serves, now and again and again."""
        await persistently(self._link, lambda: self._client.serve(registration))
        self._presence.start(registration)

    async def publish(self, request: VersionsRequest) -> None:
        """Policies were updated."""
        self._presence.publish(request.versions)
        await persistently(self._link, lambda: self._client.publish(request))

    async def finish(self, request: FinishRequest) -> None:
        """The trainer stops."""
        await self._presence.stop()
        await _at_the_end(self._link, lambda: self._client.finish(request))

    async def __aenter__(self) -> FarServer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._presence.stop()
        await self._client.close()


class FarQueue:
    """A server's rollout queue."""

    def __init__(self, client: LightningClient, link: Link) -> None:
        self._client, self._link = client, link

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Have these run; ServerError if the server refuses some of them: those before may run then."""
        await persistently(self._link, lambda: self._client.enqueue(rollouts))

    async def done(self, ids: Collection[str]) -> list[Rollout]:
        """Those of `ids` that are done; waits until one is."""
        asked = list(ids)[:MAX_IDS]
        found: list[Rollout] = []
        while asked and not found:
            found = await persistently(self._link, lambda: self._client.done(asked, _WAIT))
        return found

    async def cancel(self, ids: Collection[str]) -> None:
        """End these; if the server is away, they end when the next incarnation begins."""
        for start in range(0, len(ids), MAX_IDS):
            some = list(ids)[start : start + MAX_IDS]
            await _at_the_end(self._link, lambda some=some: self._client.cancel(some))  # type: ignore[misc]


class FarStore:
    """A server's store; see `agl_core.store.interface.Store`."""

    def __init__(self, client: LightningClient, link: Link) -> None:
        self._client, self._link = client, link

    async def open(self) -> None:
        """Nothing: the server has it open."""

    async def close(self) -> None:
        """Nothing: the server goes on with it."""

    async def put(self, *records: Record) -> None:
        if not records:
            return
        try:
            await persistently(self._link, lambda: self._client.put(records))
        except RefusedError as error:
            names = " or ".join([*map(name_of, records[:_NAMED]), *(["…"] if len(records) > _NAMED else [])])
            raise _of_store(error, f"{names}: ") from error

    async def runs(self) -> list[Run]:
        return await self._read(RunsQuery(), Run)

    async def rollouts(
        self,
        *,
        run: str | None = None,
        step: int | None = None,
        mode: Mode | None = None,
        state: RolloutState | None = None,
        group: str | None = None,
        limit: int | None = None,
    ) -> list[Rollout]:
        question = RolloutsQuery(run=run, step=step, mode=mode, state=state, group=group, limit=limit)
        return await self._read(question, Rollout)

    async def rollout(self, prefix: str) -> Rollout:
        [found] = await self._read(RolloutQuery(prefix=prefix), Rollout)
        return found

    async def attempts(self, rollout: str) -> list[Attempt]:
        return await self._read(AttemptsQuery(rollout=rollout), Attempt)

    async def calls(self, attempts: Iterable[AttemptKey]) -> list[Call]:
        return [
            call
            for some in _parts(attempts, _CALLS_AT_ONCE)
            for call in await self._read(RecordsQuery(kind="calls", attempts=some), Call)
        ]

    async def outcomes(self, attempts: Iterable[AttemptKey]) -> list[Outcome]:
        return [
            outcome
            for some in _parts(attempts, MAX_ATTEMPTS)
            for outcome in await self._read(RecordsQuery(kind="outcomes", attempts=some), Outcome)
        ]

    async def rewards(self, attempts: Iterable[AttemptKey]) -> list[Reward]:
        return [
            reward
            for some in _parts(attempts, MAX_ATTEMPTS)
            for reward in await self._read(RecordsQuery(kind="rewards", attempts=some), Reward)
        ]

    async def uses(self, attempts: Iterable[AttemptKey]) -> list[Use]:
        return [
            use
            for some in _parts(attempts, MAX_ATTEMPTS)
            for use in await self._read(RecordsQuery(kind="uses", attempts=some), Use)
        ]

    async def __aenter__(self) -> FarStore:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing, as `close`."""

    async def _read(self, question: StoreQuestion, kind: type[Kind]) -> list[Kind]:
        try:
            found = await persistently(self._link, lambda: self._client.query(question))
        except RefusedError as error:
            raise _of_store(error) from error
        return [record for record in found if isinstance(record, kind)]


class _Presence:
    """Tells the server again and again where the engine serves, from a thread."""

    def __init__(self, base_url: str, key: str, link: Link) -> None:
        self._base_url, self._key, self._link = base_url, key, link
        self._lock = threading.Lock()
        self._registration: Registration | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True, name="agl-presence")
        self.refused: ServerError | None = None
        """Why the server does not hear this trainer any more."""

    def start(self, registration: Registration) -> None:
        self._registration = registration
        self._thread.start()

    def publish(self, versions: dict[str, int]) -> None:
        """What is told from now on."""
        with self._lock:
            if self._registration is not None:
                known = {**self._registration.versions, **versions}
                self._registration = self._registration.model_copy(update={"versions": known})

    async def stop(self) -> None:
        """Tell no more; what was just being said has been said when this returns."""
        self._stopped.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _KEEP_ALIVE_TIMEOUT)

    def _tell(self) -> None:
        assert self._registration is not None
        assert self._registration.expires is not None
        interval = self._registration.expires / 4
        wait = interval
        with BlockingClient(self._base_url, self._key, _KEEP_ALIVE_TIMEOUT) as client:
            while not self._stopped.wait(wait):
                with self._lock:
                    registration = self._registration
                try:
                    client.serve(registration)
                except UnreachableError as error:
                    self._link.failed(error)
                    wait = min(_RETRY, interval)
                except ServerError as error:
                    self.refused = error
                    return
                else:
                    self._link.worked()
                    wait = interval


async def _at_the_end(link: Link, ask: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Ask a few times; what the server does not hear, or no longer wants to, it finds out by itself."""
    failures = count(1)
    try:
        await persistently(link, ask, lambda: next(failures) >= _TRIES_AT_THE_END)
    except ServerError as error:
        logger.debug("At the end: %s", error)


def _parts(attempts: Iterable[AttemptKey], size: int) -> list[list[AttemptRef]]:
    refs = [AttemptRef(rollout=key.rollout, attempt=key.attempt) for key in dict.fromkeys(attempts)]
    return [refs[start : start + size] for start in range(0, len(refs), size)]


def _of_store(error: RefusedError, names: str = "") -> StoreError:
    """The error that a store of this process would have raised."""
    if error.status not in _REFUSED:
        return StoreError(str(error))
    return StoreRefusedError(f"The store refused {names}{error.reason}" if names else error.reason)
