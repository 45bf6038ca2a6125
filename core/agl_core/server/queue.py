"""The rollout queue: every rollout's way from queued over running to done, durable at each step.

queued ──lease──▶ running ──close_attempt──▶ done
   ▲               │   ▲
   └─ tried again ─┘   └ heartbeat
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from agl_core.apis.errors import ApiError, stopping
from agl_core.capture.requests import rollout_path
from agl_core.errors import StoreError
from agl_core.plugins import RunHooks
from agl_core.server.keys import ActiveAttempt, AttemptState, Keys, decided, is_tried_again, reported
from agl_core.store.interface import Store
from agl_core.types import Attempt, AttemptKey, Ending, Mode, Rollout, RolloutState
from agl_core.wire import (
    AttemptRef,
    CloseReply,
    CloseRequest,
    HeartbeatReply,
    HeartbeatRequest,
    Lease,
    LeaseReply,
    LeaseRequest,
)

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 10_000
"""Closed attempts kept in memory, to tell a late call from a wrong address, and rollouts that are done."""
_SHORTEST_WATCH, _AFTER_FAILURE = 0.1, 5.0
_TAKEN_AWAY = frozenset({Ending.LOST, Ending.CANCELLED})


@dataclass(slots=True)
class _Life:
    """Where one rollout that is not done stands."""

    rollout: Rollout
    attempts: int = 0
    """How many were started."""


class RolloutQueue:
    """The lifecycle of rollouts. What a method did is in the store before it returns.

    `attempts` says how often a rollout is tried; `hook` is `Plugins.hook`; `keys` make the agents' keys. Times are in
    seconds: an attempt that is not closed counts as lost `grace` after its `timeout`. A worker that sends heartbeats,
    every `heartbeat`, loses what it holds `lease` after the last one that named it; a worker that never sent one keeps
    it up to that timeout. All methods belong to one event loop.
    """

    def __init__(
        self,
        store: Store,
        *,
        timeout: float,
        attempts: int,
        hook: RunHooks,
        keys: Keys,
        grace: float = 30.0,
        heartbeat: float = 5.0,
        lease: float = 20.0,
    ) -> None:
        self._store, self._hook, self._budget = store, hook, attempts
        self._timeout, self._longest, self._heartbeat, self._expiry = timeout, timeout + grace, heartbeat, lease
        self._keys = keys
        self._beating: set[str] = set()
        """Workers that have sent a heartbeat."""
        self._lives: dict[str, _Life] = {}
        self._queued: OrderedDict[str, _Life] = OrderedDict()
        self.attempts: dict[AttemptKey, ActiveAttempt] = {}
        """Those that run, and those that ended not long ago."""
        self._running: dict[AttemptKey, ActiveAttempt] = {}
        self._closed_attempts: deque[AttemptKey] = deque()
        self._done: OrderedDict[str, tuple[int, Rollout]] = OrderedDict()
        """The last rollouts that are done, with their number among all that ended here."""
        self._count_done = 0
        self.ended: float | None = None
        """When a rollout last ended here, in Unix seconds."""
        self._changed, self._progress = asyncio.Event(), asyncio.Event()
        self.waiting = 0
        """Leases that wait for a rollout."""
        self._lending, self._closed, self._stopped = True, False, False

    @property
    def queued(self) -> int:
        """Rollouts that wait for a worker."""
        return len(self._queued)

    @property
    def running(self) -> int:
        """Attempts that workers hold."""
        return len(self._running)

    def oldest(self, count: int) -> list[ActiveAttempt]:
        """The attempts that workers have held longest, the oldest first."""
        return list(itertools.islice(self._running.values(), count))

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Add new rollouts at the end, all or none."""
        await self._store.put(*rollouts)
        lives = {rollout.id: _Life(rollout) for rollout in rollouts}
        self._lives.update(lives)
        self._queued.update(lives)
        self._changed.set()

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Start attempts of up to `request.capacity` rollouts, oldest first; waits for the first one.

        If it is cancelled while it waits, nothing was taken.
        """
        self.waiting += 1
        try:
            await self._wait_for_rollouts(request.wait)
        finally:
            self.waiting -= 1
        if self._closed:
            return LeaseReply(leases=[], closed=True)
        count = min(request.capacity, len(self._queued)) if self._lending else 0
        taken = [self._queued.popitem(last=False)[1] for _ in range(count)]
        started = [self._start(life, request.worker) for life in taken]
        if started:
            try:
                await self._store.put(*(record for active in started for record in (active.rollout, active.record)))
            except BaseException:
                self._give_back(started)
                raise
        held = [active for active in started if not active.closed]  # some may have been cancelled meanwhile
        for active in held:
            self._hook.rollout_started(rollout=active.rollout, attempt=active.record.attempt)
        return LeaseReply(leases=[self._leased(active) for active in held], closed=False)

    def held(self) -> list[AttemptKey]:
        """The attempts that workers hold, oldest first."""
        return list(self._running)

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """A worker lives: extend the leases of the attempts that it names.

        A worker's first heartbeat starts the clock of all that it holds.
        """
        expires = _now() + self._expiry
        if request.worker not in self._beating:
            self._beating.add(request.worker)
            for active in self._running.values():
                if active.record.worker == request.worker:
                    active.expires = expires
        lost: list[AttemptRef] = []
        for held in request.attempts:
            key = AttemptKey(held.rollout, held.attempt)
            known = self.attempts.get(key)
            if known is None or not self._keys.holds(held.secret, key) or known.record.ending in _TAKEN_AWAY:
                lost.append(AttemptRef(rollout=key.rollout, attempt=key.attempt))
            else:
                known.expires = expires
        return HeartbeatReply(lost=lost, closed=self._closed)

    async def close_attempt(self, key: AttemptKey, request: CloseRequest) -> CloseReply:
        """End an attempt: its calls no longer count, and its rollout is done or tried again.

        The same report sent again gets the same answer. What a worker reports of an attempt that was lost and tried
        again does not count. ApiError 404 if there is no such attempt.
        """
        active = self.attempts.get(key)
        return await self._close_forgotten(key) if active is None else await self._end(active, request)

    async def done(self, ids: Collection[str]) -> list[Rollout]:
        """Those of `ids` that are done, in the order in which they ended; waits until one is.

        Their calls, tool results and rewards are in the store. Asking changes nothing, so it may be asked again.
        ApiError 503 once the queue is stopped.
        """
        wanted = set(ids)
        forgotten = sorted(id for id in wanted if id not in self._lives and id not in self._done)
        before = [await self._store.rollout(id) for id in forgotten]
        while True:
            ended = sorted(self._done[id] for id in wanted if id in self._done)
            if ended or before or not wanted:
                return before + [rollout for _, rollout in ended]
            if self._stopped:
                raise stopping()
            await self._progress.wait()

    async def cancel(self, ids: Iterable[str]) -> None:
        """End these rollouts as cancelled, whether queued or running; those that are done or unknown stay so."""
        await self._stop_early(set(ids), Ending.CANCELLED)

    async def abandon(self, run: str) -> None:
        """End as lost all that earlier restarts of the run left, in this queue and in the store."""
        await self._stop_early(set(self._lives), Ending.LOST)
        records: list[Rollout | Attempt] = []
        for state in (RolloutState.QUEUED, RolloutState.RUNNING):
            for rollout in await self._store.rollouts(run=run, state=state):
                if rollout.mode is Mode.USE:  # It was opened from outside.
                    continue
                attempts = await self._store.attempts(rollout.id)
                records += [replace(a, ended=time.time(), ending=Ending.LOST) for a in attempts if not a.ending]
                records.append(replace(rollout, state=RolloutState.DONE, ending=Ending.LOST))
        if records:
            await self._store.put(*records)

    def lend(self, lending: bool) -> None:
        """Lease rollouts from now on, or have leases wait."""
        self._lending = lending
        self._changed.set()

    def close(self) -> None:
        """The run is over: no more rollouts are leased, and workers end."""
        self._closed = True
        self._changed.set()

    def stop(self) -> None:
        """The server ends, not the run: requests that wait are refused, and may be sent again elsewhere or later."""
        self._stopped = True
        self.lend(False)
        self._wake()

    async def watch(self) -> None:
        """Close as lost, until cancelled, every attempt that is overdue: its worker is gone."""
        while True:
            due = [active.due for active in self._open()]
            # Those that are leased or extended from now on are not due before this, either.
            next_look = min([_now() + min(self._expiry, self._longest), *due])
            await asyncio.sleep(max(_SHORTEST_WATCH, next_look - _now()))
            for active in self._open():
                if error := self._why_lost(active):
                    try:
                        await self._end(active, CloseRequest(ending=Ending.LOST, error=error))
                    except Exception as failed:
                        trace = not isinstance(failed, StoreError)
                        logger.error("Attempt %s/%s is not recorded as lost: %s", *active.key, failed, exc_info=trace)
                        await asyncio.sleep(_AFTER_FAILURE)

    def _why_lost(self, active: ActiveAttempt) -> str | None:
        now, worker = _now(), active.record.worker
        if active.deadline <= now:
            return f"The worker {worker} did not report within {self._longest:g} seconds."
        if active.due <= now:
            return f"The worker {worker} sent no heartbeat for {self._expiry:g} seconds."
        return None

    async def _stop_early(self, wanted: set[str], ending: Ending) -> None:
        await self._end_queued(wanted, ending)
        held = [active for active in self._running.values() if active.key.rollout in wanted]
        await asyncio.gather(*(self._end(active, CloseRequest(ending=ending)) for active in held))
        await self._end_queued(wanted, ending)  # those whose attempt was closed to be tried again

    async def _end_queued(self, wanted: set[str], ending: Ending) -> None:
        lives = [self._queued.pop(id) for id in list(self._queued) if id in wanted]
        rollouts = [replace(life.rollout, state=RolloutState.DONE, ending=ending) for life in lives]
        if rollouts:
            try:
                await self._store.put(*rollouts)
            except BaseException:
                for life in reversed(lives):
                    self._queue_first(life)
                raise
        for rollout in rollouts:
            self._finish(rollout)

    def _open(self) -> list[ActiveAttempt]:
        """Attempts that are not closed, or whose end could not be written."""
        return [active for active in self._running.values() if active.closing is None]

    async def _wait_for_rollouts(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not (self._queued and self._lending) and not self._closed and not self._stopped:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass

    def _start(self, life: _Life, worker: str) -> ActiveAttempt:
        life.rollout = replace(life.rollout, state=RolloutState.RUNNING)
        record = Attempt(life.rollout.id, life.attempts, worker, started=time.time())
        life.attempts += 1
        expires = _now() + self._expiry if worker in self._beating else None
        active = ActiveAttempt(life.rollout, record, _now() + self._longest, expires)
        self.attempts[active.key] = self._running[active.key] = active
        return active

    def _leased(self, active: ActiveAttempt) -> Lease:
        """The attempt as its worker gets it."""
        task = active.rollout.task
        return Lease(
            rollout=active.rollout.id,
            attempt=active.record.attempt,
            task_id=task.id,
            task_input=task.input,
            task_split=task.split,
            mode=active.mode,
            path=rollout_path(*active.key),
            key=self._keys.of_attempt(active.key),
            secret=self._keys.of_lease(active.key),
            timeout=self._timeout,
            heartbeat=self._heartbeat,
            expires=self._expiry,
        )

    def _give_back(self, started: Sequence[ActiveAttempt]) -> None:
        for active in reversed([active for active in started if not active.closed]):
            active.state = AttemptState.WITHDRAWN
            life = self._lives[active.rollout.id]
            life.attempts -= 1
            life.rollout = replace(life.rollout, state=RolloutState.QUEUED)
            del self.attempts[active.key], self._running[active.key]
            self._queue_first(life)

    async def _end(self, active: ActiveAttempt, request: CloseRequest) -> CloseReply:
        """End an attempt, unless it has ended; the first request decides how."""
        if not active.over:
            if active.closing is None:
                if not active.closed:
                    active.state = AttemptState.CLOSING
                active.reported = request.ending
                active.closing = asyncio.create_task(self._close(active, request))
            try:
                await asyncio.shield(active.closing)
            except Exception:
                active.closing = None
                raise
        return CloseReply(counted=active.state is AttemptState.COUNTED and request.ending is active.reported)

    async def _close(self, active: ActiveAttempt, request: CloseRequest) -> None:
        if active.committing:
            await asyncio.wait(active.committing)
        ending, error = decided(active, request)
        record = replace(
            active.record,
            ended=time.time(),
            ending=ending,
            result=request.result,
            error=error,
            passed_through=active.passed_through or None,
            bypassed=request.bypassed or None,
        )
        again = is_tried_again(active, ending, self._budget)
        if again:
            rollout = replace(active.rollout, state=RolloutState.QUEUED)
        else:
            done = RolloutState.DONE
            rollout = replace(active.rollout, state=done, ending=ending, counted_attempt=record.attempt)
        await self._store.put(*reported(active.key, request), record, rollout)
        active.state = AttemptState.SUPERSEDED if again else AttemptState.COUNTED
        active.rollout, active.record, active.closing = rollout, record, None
        active.answered.clear()
        del self._running[active.key]
        self._closed_attempts.append(active.key)
        if len(self._closed_attempts) > MAX_REMEMBERED:
            del self.attempts[self._closed_attempts.popleft()]
        self._hook.rollout_finished(rollout=rollout, attempt=record)
        if again:
            life = self._lives[rollout.id]
            life.rollout = rollout
            self._queue_first(life)
            self._changed.set()
        else:
            self._finish(rollout)

    def _queue_first(self, life: _Life) -> None:
        self._queued[life.rollout.id] = life
        self._queued.move_to_end(life.rollout.id, last=False)

    def _finish(self, rollout: Rollout) -> None:
        del self._lives[rollout.id]
        self._count_done += 1
        self.ended = time.time()
        self._done[rollout.id] = self._count_done, rollout
        if len(self._done) > MAX_REMEMBERED:
            self._done.popitem(last=False)
        self._wake()

    def _wake(self) -> None:
        """Wake all who wait for a rollout to be done."""
        self._progress.set()
        self._progress = asyncio.Event()

    async def _close_forgotten(self, key: AttemptKey) -> CloseReply:
        """The answer for an attempt that is not in memory: one that ended long ago, or before a restart."""
        if not any(attempt.key == key and attempt.ending for attempt in await self._store.attempts(key.rollout)):
            raise ApiError(
                404,
                f"There is no attempt {key.attempt} of rollout {key.rollout} here. Only attempts that were leased "
                f"from this server can be closed; check the server's address and the ids.",
                code="attempt_unknown",
            )
        return CloseReply(counted=(await self._store.rollout(key.rollout)).counted_attempt == key.attempt)


def _now() -> float:
    return asyncio.get_running_loop().time()
