"""The rollout queue: every rollout's way from queued over running to done, durable at each step.

queued ──lease──▶ running ──close_attempt──▶ done
   ▲               │   ▲
   └─ tried again ─┘   └ heartbeat

`lifecycle` is the table of all ways there are.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from agl_core.errors import StoreError
from agl_core.run_hooks import RunHooks
from agl_core.server.keys import Keys
from agl_core.server.rollouts.attempt import ActiveAttempt, decided, is_tried_again, reported
from agl_core.server.rollouts.finished import Finished
from agl_core.server.rollouts.late import LateReports
from agl_core.server.rollouts.leases import Leases
from agl_core.server.rollouts.lifecycle import AttemptState, moved
from agl_core.store.interface import Store
from agl_core.types import Attempt, AttemptKey, Call, Ending, Mode, Rollout, RolloutState
from agl_core.wire.workers import CloseReply, CloseRequest, HeartbeatReply, HeartbeatRequest, LeaseReply, LeaseRequest

logger = logging.getLogger(__name__)

_REMEMBERED = 10_000
"""Closed attempts kept in memory, to tell a late call from a wrong address, and rollouts that are done."""

_SHORTEST_WATCH, _AFTER_FAILURE = 0.1, 5.0


@dataclass(slots=True)
class _Life:
    """Where one rollout that is not done stands."""

    rollout: Rollout
    attempts: int = 0
    """How many were started."""


class RolloutQueue:
    """The lifecycle of rollouts. What a method did is in the store before it returns.

    `attempts` says how often a rollout is tried; the times are seconds, and those of `Leases`. `hook` is
    `Plugins.hook`; `keys` make the agents' keys. All methods belong to one event loop.
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
        self._leases = Leases(timeout=timeout, grace=grace, heartbeat=heartbeat, lease=lease, keys=keys)
        self._lives: dict[str, _Life] = {}
        self._queued: OrderedDict[str, _Life] = OrderedDict()
        self._attempts: dict[AttemptKey, ActiveAttempt] = {}
        self._running: dict[AttemptKey, ActiveAttempt] = {}
        self._ended: deque[AttemptKey] = deque()
        self._finished = Finished(store, _REMEMBERED)
        self._late = LateReports(store)
        self._changed = asyncio.Event()
        self._waiting = 0
        self._lending = True
        self._closed = False
        self._stopped = False

    @property
    def queued(self) -> int:
        """Rollouts that wait for a worker."""
        return len(self._queued)

    @property
    def running(self) -> int:
        """Attempts that workers hold."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Leases that wait for a rollout."""
        return self._waiting

    @property
    def ended(self) -> float | None:
        """When a rollout last ended here, in Unix seconds."""
        return self._finished.latest

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
        self._waiting += 1
        try:
            await self._wait_for_rollouts(request.wait)
        finally:
            self._waiting -= 1
        if self._closed:
            return LeaseReply(leases=[], closed=True)
        count = min(request.capacity, len(self._queued)) if self._lending else 0
        taken = [self._queued.popitem(last=False)[1] for _ in range(count)]
        started = [self._start(life, request.worker) for life in taken]
        if started:
            try:
                await self._store.put(*(record for each in started for record in (each.rollout, each.record)))
            except BaseException:
                self._give_back(started)
                raise
        held = [each for each in started if not each.closed]  # some may have been cancelled meanwhile
        for each in held:
            self._hook.rollout_started(rollout=each.rollout, attempt=each.record.attempt)
        return LeaseReply(leases=[self._leases.lent(each) for each in held], closed=False)

    def attempt(self, key: AttemptKey) -> ActiveAttempt | None:
        """The attempt, running or ended; None if it was never started here, or ended long ago."""
        return self._attempts.get(key)

    def held(self) -> list[AttemptKey]:
        """The attempts that workers hold, oldest first."""
        return list(self._running)

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """A worker lives: extend the leases of the attempts that it names."""
        lost = self._leases.beat(request, self._attempts, self._running.values())
        return HeartbeatReply(lost=lost, closed=self._closed)

    async def close_attempt(self, key: AttemptKey, request: CloseRequest) -> CloseReply:
        """End an attempt: its calls no longer count, and its rollout is done or tried again.

        The same report sent again gets the same answer. What a worker reports of an attempt that was lost and tried
        again is recorded, and does not count. ApiError 404 if there is no such attempt.
        """
        active = self._attempts.get(key)
        if active is None:
            return await self._late.answer(key, request)
        reply = await self._end(active, request)
        if active.state is AttemptState.SUPERSEDED and request.ending is not active.reported:
            active.record = await self._late.record(active.record, request)
        return reply

    async def done(self, ids: Collection[str]) -> list[Rollout]:
        """Those of `ids` that are done, in the order in which they ended; waits until one is.

        Their calls, tool results and rewards are in the store. Asking changes nothing, so it may be asked again.
        ApiError 503 once the queue is stopped.
        """
        return await self._finished.among(ids, self._lives)

    async def cancel(self, ids: Iterable[str]) -> None:
        """End these rollouts as cancelled, whether queued or running; those that are done or unknown stay so."""
        await self._stop_early(set(ids), Ending.CANCELLED)

    async def abandon(self, run: str) -> None:
        """End as lost all that earlier restarts of the run left, in this queue and in the store."""
        await self._stop_early(set(self._lives), Ending.LOST)
        left: list[Rollout | Attempt] = []
        for state in (RolloutState.QUEUED, RolloutState.RUNNING):
            for rollout in await self._store.rollouts(run=run, state=state):
                if rollout.mode is Mode.USE:  # Sessions belong to no queue.
                    continue
                attempts = await self._store.attempts(rollout.id)
                left += [replace(each, ended=time.time(), ending=Ending.LOST) for each in attempts if not each.ending]
                left.append(moved(rollout, RolloutState.DONE, ending=Ending.LOST))
        if left:
            await self._store.put(*left)

    def lend(self, lending: bool) -> None:
        """Whether rollouts are leased now; if not, leases wait."""
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
        self._finished.stop()

    async def watch(self) -> None:
        """Close as lost, until cancelled, every attempt that is overdue: its worker is gone."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(_SHORTEST_WATCH, self._leases.next_look(self._open()) - loop.time()))
            for each in self._open():
                if error := self._leases.why_lost(each):
                    try:
                        await self._end(each, CloseRequest(ending=Ending.LOST, error=error))
                    except Exception as failed:
                        trace = not isinstance(failed, StoreError)
                        logger.error("Attempt %s/%s is not recorded as lost: %s", *each.key, failed, exc_info=trace)
                        await asyncio.sleep(_AFTER_FAILURE)

    async def _stop_early(self, wanted: set[str], ending: Ending) -> None:
        await self._end_queued(wanted, ending)
        held = [each for each in self._running.values() if each.key.rollout in wanted]
        await asyncio.gather(*(self._end(each, CloseRequest(ending=ending)) for each in held))
        await self._end_queued(wanted, ending)  # those whose attempt was closed to be tried again

    async def _end_queued(self, wanted: set[str], ending: Ending) -> None:
        lives = [self._queued.pop(id) for id in list(self._queued) if id in wanted]
        rollouts = [moved(life.rollout, RolloutState.DONE, ending=ending) for life in lives]
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
        return [each for each in self._running.values() if each.closing is None]

    async def _wait_for_rollouts(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not (self._queued and self._lending) and not self._closed and (left := until - loop.time()) > 0:
            if self._stopped:
                return
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return

    def _start(self, life: _Life, worker: str) -> ActiveAttempt:
        life.rollout = moved(life.rollout, RolloutState.RUNNING)
        record = Attempt(life.rollout.id, life.attempts, worker, started=time.time())
        life.attempts += 1
        return self._hold(self._leases.start(life.rollout, record))

    def _hold(self, active: ActiveAttempt) -> ActiveAttempt:
        self._attempts[active.key] = self._running[active.key] = active
        return active

    def _give_back(self, started: Sequence[ActiveAttempt]) -> None:
        for each in reversed([each for each in started if not each.closed]):
            each.move(AttemptState.WITHDRAWN)
            life = self._lives[each.rollout.id]
            life.attempts -= 1
            life.rollout = moved(life.rollout, RolloutState.QUEUED)
            del self._attempts[each.key], self._running[each.key]
            self._queue_first(life)

    async def _end(self, active: ActiveAttempt, request: CloseRequest) -> CloseReply:
        """End an attempt, unless it has ended; the first request decides how."""
        if not active.over:
            if active.closing is None:
                if not active.closed:
                    active.move(AttemptState.CLOSING)
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
            rollout = moved(active.rollout, RolloutState.QUEUED)
        else:
            rollout = moved(active.rollout, RolloutState.DONE, ending=ending, counted=record.attempt)
        undelivered = await self._undelivered(active.key, request)
        await self._store.put(*reported(active.key, request), *undelivered, record, rollout)
        active.move(AttemptState.SUPERSEDED if again else AttemptState.COUNTED)
        active.rollout, active.record, active.closing = rollout, record, None
        active.retries.clear()
        del self._running[active.key]
        self._remember(active.key)
        self._hook.rollout_finished(rollout=rollout, attempt=record)
        if again:
            life = self._lives[rollout.id]
            life.rollout = rollout
            self._queue_first(life)
            self._changed.set()
        else:
            self._finish(rollout)

    async def _undelivered(self, key: AttemptKey, request: CloseRequest) -> list[Call]:
        """The calls whose replies the agent did not read to their end, marked so."""
        named = set(request.undelivered)
        calls = await self._store.calls([key]) if named else ()
        return [replace(call, undelivered=True) for call in calls if call.id in named]

    def _queue_first(self, life: _Life) -> None:
        self._queued[life.rollout.id] = life
        self._queued.move_to_end(life.rollout.id, last=False)

    def _finish(self, rollout: Rollout) -> None:
        del self._lives[rollout.id]
        self._finished.add(rollout)

    def _remember(self, key: AttemptKey) -> None:
        self._ended.append(key)
        if len(self._ended) > _REMEMBERED:
            del self._attempts[self._ended.popleft()]
