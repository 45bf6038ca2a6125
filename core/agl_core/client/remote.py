"""A Lightning Server elsewhere, with the interface of one in the trainer's own process.

While the server is away, every request waits for it; the log has one line about it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from itertools import count
from typing import Any, TypeVar, Unpack

from agl_core.client.http import BlockingClient, LightningClient, RefusedError, UnreachableError
from agl_core.client.link import Link, persistently
from agl_core.errors import ServerError, StoreError, StoreRefusedError
from agl_core.store.codec import name_of
from agl_core.store.interface import Record, Store, Wanted
from agl_core.types import (
    Attempt,
    AttemptKey,
    Call,
    Reward,
    Rollout,
    Run,
    ToolResult,
    TrainingRecord,
)
from agl_core.wire import trainers as wire
from agl_core.wire.body import Empty
from agl_core.wire.workers import AttemptRef

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Kind = TypeVar("Kind", Run, Rollout, Attempt, Call, ToolResult, Reward, TrainingRecord)

_WAIT = 20.0
"""Seconds that one request for finished rollouts waits."""
_CALLS_AT_ONCE = 256
"""Attempts per request for calls, which are large."""
_TRIES_AT_THE_END = 4
"""A trainer that stops does not wait long for a server that is away."""
_KEEP_ALIVE_TIMEOUT = 10.0
_RETRY = 1.0
_REFUSED = frozenset({413, 422})
"""The statuses that say that a request's content is wrong."""
_NAMED = 3
"""The most records that an error names."""


class RemoteServer:
    """A server at `base_url`, with the operator's `key`; see `agl_core.training.server.TrainingServer`.

    The server counts the trainer as gone if it hears nothing for `lease` seconds.
    """

    worker_key = None

    def __init__(self, base_url: str, key: str, lease: float = 20.0) -> None:
        self.base_url = base_url
        self._client = LightningClient(base_url, key)
        self.run = RemoteRun(self._client, lease)

    async def __aenter__(self) -> RemoteServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.run.fall_silent()
        await self._client.close()


class RemoteRun:
    """The run that such a server serves; see `agl_core.training.server.RunControl`.

    A thread repeats the engine's address, so that the trainer's event loop cannot delay it. `check` raises once another
    trainer has taken over the run.
    """

    def __init__(self, client: LightningClient, lease: float) -> None:
        self._client, self._lease = client, lease
        self._link = Link(client.base_url)
        self.queue = RemoteQueue(client, self._link)
        self.store = RemoteStore(client, self._link)
        self._presence = _Presence(client.base_url, client.key, self._link)

    def check(self) -> None:
        """ServerError if the server no longer listens to this trainer."""
        if self._presence.refused is not None:
            raise self._presence.refused

    async def begin(self, request: wire.BeginRequest) -> wire.BeginReply:
        reply = await persistently(self._link, lambda: self._client.ask(wire.BEGIN, request))
        self._client.restart = reply.restart
        return reply

    async def serve(self, registration: wire.Registration) -> None:
        """Report the engine's address, and repeat it until the trainer stops."""
        registration = registration.model_copy(update={"expires": self._lease})
        await persistently(self._link, lambda: self._client.ask(wire.SERVE, registration))
        self._presence.start(registration, self._lease / 4)

    async def publish(self, request: wire.VersionsRequest) -> None:
        """Policies were updated."""
        self._presence.publish(request.versions)
        await persistently(self._link, lambda: self._client.ask(wire.PUBLISH, request))

    async def activity(self) -> wire.Activity:
        return await persistently(self._link, lambda: self._client.ask(wire.ACTIVITY, Empty()))

    async def finish(self, request: wire.FinishRequest) -> None:
        await self.fall_silent()
        await _at_the_end(self._link, lambda: self._client.ask(wire.FINISH, request))

    async def fall_silent(self) -> None:
        await self._presence.stop()


class RemoteQueue:
    """A server's rollout queue."""

    def __init__(self, client: LightningClient, link: Link) -> None:
        self._client, self._link = client, link

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Add these rollouts. ServerError if the server refuses some of them; those before it may run."""
        await persistently(self._link, lambda: self._client.enqueue(rollouts))

    async def done(self, ids: Collection[str]) -> list[Rollout]:
        """Those of `ids` that are done; waits until one is."""
        asked = list(ids)[: wire.MAX_IDS]
        found: list[Rollout] = []
        while asked and not found:
            found = await persistently(self._link, lambda: self._client.done(asked, _WAIT))
        return found

    async def cancel(self, ids: Collection[str]) -> None:
        """End these; if the server is away, they end when the next restart begins."""
        for start in range(0, len(ids), wire.MAX_IDS):
            some = list(ids)[start : start + wire.MAX_IDS]
            await _at_the_end(self._link, lambda some=some: self._client.cancel(some))  # type: ignore[misc]


class RemoteStore(Store):
    """A server's store; see `agl_core.store.interface.Store`."""

    def __init__(self, client: LightningClient, link: Link) -> None:
        self._client, self._link = client, link

    async def open(self) -> None:
        """Do nothing: the server has the store open."""

    async def close(self) -> None:
        """Do nothing: the server goes on using the store."""

    async def put(self, *records: Record) -> None:
        if not records:
            return
        try:
            await persistently(self._link, lambda: self._client.put(records))
        except RefusedError as error:
            names = " or ".join([*map(name_of, records[:_NAMED]), *(["…"] if len(records) > _NAMED else [])])
            raise _of_store(error, f"{names}: ") from error

    async def runs(self) -> list[Run]:
        return await self._read(wire.RunsQuery(), Run)

    async def rollouts(self, **wanted: Unpack[Wanted]) -> list[Rollout]:
        return await self._read(wire.RolloutsQuery(**wanted), Rollout)

    async def rollout(self, prefix: str) -> Rollout:
        [found] = await self._read(wire.RolloutQuery(prefix=prefix), Rollout)
        return found

    async def attempts(self, *rollouts: str) -> list[Attempt]:
        found: list[Attempt] = []
        for start in range(0, len(rollouts), wire.MAX_ATTEMPTS):
            asked = list(rollouts[start : start + wire.MAX_ATTEMPTS])
            found += await self._read(wire.AttemptsQuery(rollouts=asked), Attempt)
        return found

    async def calls(self, attempts: Iterable[AttemptKey]) -> list[Call]:
        return await self._recorded("calls", attempts, Call, _CALLS_AT_ONCE)

    async def tool_results(self, attempts: Iterable[AttemptKey]) -> list[ToolResult]:
        return await self._recorded("tool_results", attempts, ToolResult)

    async def rewards(self, attempts: Iterable[AttemptKey]) -> list[Reward]:
        return await self._recorded("rewards", attempts, Reward)

    async def training_records(self, attempts: Iterable[AttemptKey]) -> list[TrainingRecord]:
        return await self._recorded("training_records", attempts, TrainingRecord)

    async def _recorded(
        self, name: wire.RecordsName, attempts: Iterable[AttemptKey], kind: type[Kind], at_once: int = wire.MAX_ATTEMPTS
    ) -> list[Kind]:
        """The records of these attempts, in as many requests as needed."""
        refs = [AttemptRef(rollout=key.rollout, attempt=key.attempt) for key in dict.fromkeys(attempts)]
        found: list[Kind] = []
        for start in range(0, len(refs), at_once):
            found += await self._read(wire.RecordsQuery(kind=name, attempts=refs[start : start + at_once]), kind)
        return found

    async def _read(self, question: wire.StoreQuestion, kind: type[Kind]) -> list[Kind]:
        try:
            found = await persistently(self._link, lambda: self._client.query(question))
        except RefusedError as error:
            raise _of_store(error) from error
        return [record for record in found if isinstance(record, kind)]


class _Presence:
    """Repeats the engine's address from a thread."""

    def __init__(self, base_url: str, key: str, link: Link) -> None:
        self._base_url, self._key, self._link = base_url, key, link
        self._lock = threading.Lock()
        self._registration: wire.Registration | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.refused: ServerError | None = None
        """Why the server no longer listens to this trainer."""

    def start(self, registration: wire.Registration, interval: float) -> None:
        self._registration = registration
        self._thread = threading.Thread(target=self._repeat, args=(interval,), daemon=True, name="agl-presence")
        self._thread.start()

    def publish(self, versions: dict[str, int]) -> None:
        """From now on, report these versions."""
        with self._lock:
            if self._registration is not None:
                known = {**self._registration.versions, **versions}
                self._registration = self._registration.model_copy(update={"versions": known})

    async def stop(self) -> None:
        """Send no more; a request under way has ended when this returns."""
        self._stopped.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _KEEP_ALIVE_TIMEOUT)

    def _repeat(self, interval: float) -> None:
        wait = interval
        with BlockingClient(self._base_url, self._key, _KEEP_ALIVE_TIMEOUT) as client:
            while not self._stopped.wait(wait):
                with self._lock:
                    registration = self._registration
                assert registration is not None
                try:
                    client.ask(wire.SERVE, registration)
                except UnreachableError as error:
                    self._link.failed(self, error)
                    wait = min(_RETRY, interval)
                except ServerError as error:
                    self.refused = error
                    return
                else:
                    self._link.worked(self)
                    wait = interval


async def _at_the_end(link: Link, ask: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Ask a few times. A server that gets no request, or refuses it, finds out by itself."""
    failures = count(1)
    try:
        await persistently(link, ask, lambda: next(failures) >= _TRIES_AT_THE_END)
    except ServerError as error:
        logger.debug("At the end: %s", error)


def _of_store(error: RefusedError, names: str = "") -> StoreError:
    """The error that a store of this process would have raised."""
    if error.status not in _REFUSED:
        return StoreError(str(error))
    return StoreRefusedError(f"The store refused {names}{error.reason}" if names else error.reason)
