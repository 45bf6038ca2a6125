"""The rollout queue: every rollout's way from queued over running to done, durable at each step.

queued ──lease──▶ running ──close_attempt──▶ done ──next_done──▶ trainer
   ▲                 │
   └── tried again ──┘
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agl_core.errors import ServerError
from agl_core.server.attempts import ActiveAttempt, is_tried_again, judge
from agl_core.store.interface import Record, Store
from agl_core.types import Attempt, AttemptKey, Ending, Outcome, Reward, Rollout, RolloutState
from agl_core.wire import CloseReply, CloseRequest, Lease, LeaseReply, LeaseRequest, rollout_path

logger = logging.getLogger(__name__)

_REMEMBERED = 10_000
"""Closed attempts kept in memory, to tell a late call from a wrong address."""

_SHORTEST_WATCH = 0.1


@dataclass(slots=True)
class _Life:
    """Where one rollout that is not done stands."""

    rollout: Rollout
    attempts: int = 0
    """How many were started."""


class RolloutQueue:
    """The life cycle of rollouts. What a method did is in the store before it returns.

    `timeout` is how many seconds a worker gives an attempt, `attempts` how often a rollout is tried, `grace` how
    many seconds after its timeout an attempt that nobody closed counts as lost (see `watch`). `hook` is
    `Plugins.hook`. All methods belong to one event loop.
    """

    def __init__(self, store: Store, *, timeout: float, attempts: int, hook: Any, grace: float = 30.0) -> None:
        self._store, self._hook = store, hook
        self._timeout, self._budget, self._grace = timeout, attempts, grace
        self._lives: dict[str, _Life] = {}
        self._queued: OrderedDict[str, _Life] = OrderedDict()
        self._attempts: dict[AttemptKey, ActiveAttempt] = {}
        self._running: dict[AttemptKey, ActiveAttempt] = {}
        self._ended: deque[AttemptKey] = deque()
        self._done: asyncio.Queue[Rollout] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._waiting = 0
        self._closed = False

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

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts at the end, all or none. ServerError if one is already there or the queue is closed."""
        if self._closed:
            raise ServerError("The rollout queue is closed: the run is over. Start a new run to add rollouts.")
        counts = Counter(rollout.id for rollout in rollouts)
        if twice := [id for id, count in counts.items() if count > 1 or id in self._lives]:
            raise ServerError(f"Rollouts are already in the queue: {', '.join(sorted(twice))}. Give each a new id.")
        lives = {each.id: _Life(replace(each, state=RolloutState.QUEUED)) for each in rollouts}
        self._lives.update(lives)
        try:
            await self._store.put(*(life.rollout for life in lives.values()))
        except BaseException:
            for id in lives:
                del self._lives[id]
            raise
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
        taken = [self._queued.popitem(last=False)[1] for _ in range(min(request.capacity, len(self._queued)))]
        started = [self._start(life, request.worker) for life in taken]
        if started:
            try:
                await self._store.put(*(record for each in started for record in (each.rollout, each.record)))
            except BaseException:
                self._give_back(started)
                raise
        held = [each for each in started if not each.closed]  # some may have been cancelled meanwhile
        for each in held:
            self._fire(self._hook.rollout_started, rollout=each.rollout, attempt=each.record.attempt)
        return LeaseReply(leases=[self._lease(each) for each in held], closed=False)

    def attempt(self, key: AttemptKey) -> ActiveAttempt | None:
        """The attempt, running or ended; None if it was never started here, or ended long ago."""
        return self._attempts.get(key)

    async def close_attempt(self, key: AttemptKey, request: CloseRequest) -> CloseReply:
        """End an attempt: its calls no longer count, and its rollout is done or tried again.

        The same report sent again gets the same answer. ServerError if there is no such attempt.
        """
        active = self._attempts.get(key)
        if active is None:
            return await self._closed_before(key)
        if active.closing is None:
            active.closed, active.reported = True, request.ending
            active.closing = asyncio.create_task(self._close(active, request))
        try:
            reply = await asyncio.shield(active.closing)
        except Exception:
            active.closing = None
            raise
        return reply if request.ending is active.reported else CloseReply(counted=False)

    async def next_done(self) -> Rollout:
        """Take the next rollout that is done; waits for it. Its calls, outcomes and rewards are in the store."""
        return await self._done.get()

    def done_now(self) -> list[Rollout]:
        """Take every further rollout that is done by now."""
        return [self._done.get_nowait() for _ in range(self._done.qsize())]

    async def cancel(self, ids: Iterable[str]) -> None:
        """End these rollouts as cancelled, whether queued or running; those that are done or unknown stay so."""
        wanted = set(ids)
        await self._cancel_queued(wanted)
        held = [key for key in self._running if key.rollout in wanted]
        await asyncio.gather(*(self.close_attempt(key, CloseRequest(ending=Ending.CANCELLED)) for key in held))
        await self._cancel_queued(wanted)  # those whose attempt was just being closed to be tried again

    def close(self) -> None:
        """The run is over: no more rollouts are taken in or leased, and workers are told so."""
        self._closed = True
        self._changed.set()

    async def watch(self) -> None:
        """Close as lost, until cancelled, every attempt that is overdue: its worker is gone."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(_SHORTEST_WATCH, self._next_deadline() - loop.time()))
            for each in [each for each in self._open() if each.deadline <= loop.time()]:
                error = (
                    f"The worker {each.record.worker} did not report within {self._timeout + self._grace:g} seconds."
                )
                try:
                    await self.close_attempt(each.key, CloseRequest(ending=Ending.LOST, error=error))
                except Exception:
                    logger.exception("Could not record that attempt %s/%s was lost.", *each.key)

    async def _cancel_queued(self, wanted: set[str]) -> None:
        lives = [self._queued.pop(id) for id in list(self._queued) if id in wanted]
        rollouts = [replace(life.rollout, state=RolloutState.DONE, ending=Ending.CANCELLED) for life in lives]
        if rollouts:
            await self._store.put(*rollouts)
        for rollout in rollouts:
            self._finish(rollout)

    def _next_deadline(self) -> float:
        new = asyncio.get_running_loop().time() + self._timeout + self._grace
        return min((each.deadline for each in self._open()), default=new)

    def _open(self) -> list[ActiveAttempt]:
        """Attempts that nobody closed, or whose end could not be written."""
        return [each for each in self._running.values() if each.closing is None]

    async def _wait_for_rollouts(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not self._queued and not self._closed and (left := until - loop.time()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return

    def _start(self, life: _Life, worker: str) -> ActiveAttempt:
        life.rollout = replace(life.rollout, state=RolloutState.RUNNING)
        record = Attempt(life.rollout.id, life.attempts, worker, started=time.time())
        life.attempts += 1
        deadline = asyncio.get_running_loop().time() + self._timeout + self._grace
        active = ActiveAttempt(life.rollout, record, deadline)
        self._attempts[record.key] = self._running[record.key] = active
        return active

    def _give_back(self, started: Sequence[ActiveAttempt]) -> None:
        for each in reversed(started):
            if each.closed:
                continue
            life = self._lives[each.rollout.id]
            life.attempts -= 1
            life.rollout = replace(life.rollout, state=RolloutState.QUEUED)
            del self._attempts[each.key], self._running[each.key]
            self._queue_first(life)

    def _lease(self, active: ActiveAttempt) -> Lease:
        task = active.rollout.task
        return Lease(
            rollout=active.rollout.id,
            attempt=active.record.attempt,
            task_id=task.id,
            task_input=task.input,
            task_split=task.split,
            mode=active.mode,
            timeout=self._timeout,
            path=rollout_path(*active.key),
        )

    async def _close(self, active: ActiveAttempt, request: CloseRequest) -> CloseReply:
        if active.committing:
            await asyncio.wait(active.committing)
        ending, error = judge(active, request)
        record = replace(active.record, ended=time.time(), ending=ending, result=request.result, error=error)
        again = is_tried_again(active, ending, self._budget)
        if again:
            rollout = replace(active.rollout, state=RolloutState.QUEUED)
        else:
            rollout = replace(active.rollout, state=RolloutState.DONE, ending=ending, counted_attempt=record.attempt)
        await self._store.put(*_reports(active.key, request), record, rollout)
        active.record = record
        active.retries.clear()
        del self._running[active.key]
        self._remember(active.key)
        self._fire(self._hook.rollout_finished, rollout=rollout, attempt=record)
        if again:
            life = self._lives[rollout.id]
            life.rollout = rollout
            self._queue_first(life)
            self._changed.set()
        else:
            self._finish(rollout)
        return CloseReply(counted=not again)

    async def _closed_before(self, key: AttemptKey) -> CloseReply:
        """The answer for an attempt that is not in memory: one that ended long ago, or before a restart."""
        ended = [each for each in await self._store.attempts(key.rollout) if each.key == key and each.ending]
        if not ended:
            raise ServerError(
                f"There is no attempt {key.attempt} of rollout {key.rollout} here. Only attempts that were leased "
                f"from this server can be closed; check the server's address and the ids."
            )
        rollout = await self._store.rollout(key.rollout)
        return CloseReply(counted=rollout.counted_attempt == key.attempt)

    def _queue_first(self, life: _Life) -> None:
        self._queued[life.rollout.id] = life
        self._queued.move_to_end(life.rollout.id, last=False)

    def _finish(self, rollout: Rollout) -> None:
        del self._lives[rollout.id]
        self._done.put_nowait(rollout)

    def _remember(self, key: AttemptKey) -> None:
        self._ended.append(key)
        if len(self._ended) > _REMEMBERED:
            del self._attempts[self._ended.popleft()]

    def _fire(self, hook: Callable[..., Any], **arguments: object) -> None:
        try:
            hook(**arguments)
        except Exception:
            logger.exception("A plugin's hook failed; the run goes on without it.")


def _reports(key: AttemptKey, request: CloseRequest) -> list[Record]:
    """What the agent's side tells of the attempt, as records; rewards of one name add up."""
    outcomes = [Outcome(rollout=key.rollout, attempt=key.attempt, **each.model_dump()) for each in request.outcomes]
    totals: dict[str, float] = {}
    for reward in request.rewards:
        totals[reward.name] = totals.get(reward.name, 0.0) + reward.value
    rewards = [Reward(*key, name=name, value=total, source="agent") for name, total in totals.items()]
    return [*outcomes, *rewards]
