"""The rollout queue: every rollout's way from queued over running to done, each step made in the store.

queued ──lease──▶ running ──close_attempt──▶ done
   ▲               │   ▲
   └─ tried again ─┘   └ heartbeat

The store alone knows the states, so several servers may share it: each serves the attempts that it leased, and any of
them ends those of a server that is gone. A rollout ends once, and at most one of its attempts counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from agl_core import hooks
from agl_core.apis.errors import ApiError, stopping
from agl_core.capture.requests import rollout_path
from agl_core.errors import StoreError
from agl_core.plugins import RunHooks
from agl_core.store import Record, Store
from agl_core.types import Attempt, AttemptKey, Ending, Reward, Rollout, RolloutState, Source
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
from agl_server.gateway.attempts import ActiveAttempt
from agl_server.http.keys import Keys, equal_secrets

_TRIED_AGAIN = frozenset({Ending.CRASHED, Ending.TIMED_OUT})
_NO_CALL = (
    "The agent finished without one LLM call through agl, so there is nothing to learn from. Its LLM client does "
    "not use agl's base URL: let it read OPENAI_BASE_URL or ANTHROPIC_BASE_URL (do not set base_url in code), or pass "
    "it `context.base_url` and `context.api_key`. Programs like Codex need settings: start them by harness."
)
_INTERRUPTED = "The server, its store, or the model behind it was away while the agent ran, which may be why it failed:"
_NOT_AWAITED = "The agent finished before its first LLM call did: let it wait for the reply."
logger = logging.getLogger(__name__)

MAX_REMEMBERED = 10_000
"""Closed attempts kept, to tell a late call from a wrong address."""
_HEARTBEATS_PER_LEASE = 4
"""Three of them may be late or lost."""
_LONGEST_PAUSE, _LOOKS_PER_LEASE = 1.0, 20
"""At most so many seconds between two looks into the store, and at least so many looks per lease."""
_AFTER_FAILURE = 5.0
"""Seconds until the next look into a store that failed."""
_TAKEN_AWAY = (None, Ending.LOST, Ending.CANCELLED)


@dataclass(slots=True)
class _Sighting:
    """One lease over this server's looks into the store, whichever server gave it.

    Looks are counted, not time: clocks differ and jump, and a server that stood still gave workers no chance to renew.
    """

    renewals: int = -1
    age: int = -1
    """Looks since the first that found it."""
    silence: int = -1
    """Looks since it was last found renewed."""


class RolloutQueue:
    """The lifecycle of rollouts, on one event loop. Each method returns once the store has what it did.

    A rollout is tried up to `attempts` times; `prompts` are the texts of named prompts where a rollout has no others.
    An attempt that is not closed is lost `timeout` + `grace` seconds after its start, or `lease` seconds after the last
    heartbeat that named it, if its worker sends any.
    """

    def __init__(
        self,
        store: Store,
        *,
        timeout: float,
        attempts: int,
        hook: RunHooks,
        keys: Keys,
        prompts: Mapping[str, str] = MappingProxyType({}),
        grace: float = 30.0,
        lease: float = 20.0,
    ) -> None:
        self._store, self._hook, self._budget = store, hook, attempts
        self._timeout, self._longest, self._expiry = timeout, timeout + grace, lease
        self._keys, self._prompts = keys, prompts
        self._pause = min(_LONGEST_PAUSE, lease / _LOOKS_PER_LEASE)
        self._beating: set[str] = set()
        """Workers that have sent a heartbeat."""
        self.running: dict[AttemptKey, ActiveAttempt] = {}
        """Attempts leased here that workers hold, oldest first."""
        self.attempts: dict[AttemptKey, ActiveAttempt] = {}
        """These, and others that ended not long ago."""
        self._closed_attempts: deque[AttemptKey] = deque()
        self.ended: float | None = None
        """When a rollout last ended here, in Unix seconds."""
        self.queued = 0
        """Rollouts that waited for a worker at the last look."""
        self._work, self._progress = asyncio.Event(), asyncio.Event()
        """Set, and replaced, when rollouts may wait for a worker, and when some may be done."""
        self.waiting = 0
        """Requests for a lease that wait for a rollout."""
        self._lending, self._closed, self._stopped = True, False, False

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Append new rollouts, all or none."""
        await self._store.put(*rollouts)
        self._offer()

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Start attempts of the oldest `request.capacity` rollouts; waits for the first. Cancelled, it took nothing."""
        self.waiting += 1
        try:
            claimed = await self._claim(request)
        finally:
            self.waiting -= 1
        held = [ActiveAttempt(*records) for records in claimed if records[1].key not in self.attempts]
        for active in held:  # Others have been cancelled meanwhile.
            self.attempts[active.key] = self.running[active.key] = active
            self._hook.call(hooks.rollout_started, rollout=active.rollout, attempt=active.record.attempt)
        return LeaseReply(leases=[self._leased(active) for active in held], closed=self._closed)

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """Renew the leases that a worker names; its first heartbeat starts the clock of all that it holds."""
        self._beating.add(request.worker)
        secrets = {AttemptKey(held.rollout, held.attempt): held.secret for held in request.attempts}
        own = {key for key, secret in secrets.items() if equal_secrets(secret, self._keys.of_lease(key))}
        kept = await self._store.renew(request.worker, own)
        kept |= {key for key in own if key in self.attempts and self.attempts[key].reported not in _TAKEN_AWAY}
        lost = [AttemptRef(**key._asdict()) for key in secrets if key not in kept]
        return HeartbeatReply(lost=lost, closed=self._closed)

    async def close_attempt(self, key: AttemptKey, request: CloseRequest) -> CloseReply:
        """End an attempt: its calls no longer count, and its rollout is done or tried again.

        The same report sent again gets the same answer; one of an attempt that was lost meanwhile does not count.
        ApiError 404 if it was not leased here and has not ended.
        """
        active = await self._known(key)
        if active is None or (active.record.ending is None and key not in self.attempts):
            raise ApiError(
                404,
                f"There is no attempt {key.attempt} of rollout {key.rollout} here. Only attempts that were leased "
                f"from this server can be closed; check the server's address and the ids.",
                code="attempt_unknown",
            )
        return await self._end(active, request)

    async def done(self, ids: Collection[str]) -> list[Rollout]:
        """Wait until some of `ids` are done, and return these, oldest first; ApiError 503 once the queue is stopped."""
        while True:
            progress = self._progress
            done = await self._store.done(ids)
            if done or not ids:
                return done
            if self._stopped:
                raise stopping()
            await progress.wait()

    async def cancel(self, ids: Collection[str], ending: Ending = Ending.CANCELLED) -> None:
        """End these rollouts, queued or running; others are passed over."""
        while True:
            cancelled, leases = await self._store.cancel_waiting(ids, ending)
            if cancelled:
                self.ended = time.time()
                self._wake()
            if not leases:  # One that is tried again is cancelled, too.
                return
            held = [active for key in leases if (active := await self._known(key))]
            await asyncio.gather(*(self._end(active, CloseRequest(ending=ending)) for active in held))

    async def abandon(self, run: str) -> None:
        """End as lost all that earlier restarts of a run left."""
        states = (RolloutState.QUEUED, RolloutState.RUNNING)
        ids = [rollout.id for state in states for rollout in await self._store.rollouts(run=run, state=state)]
        await self.cancel(ids, Ending.LOST)

    def lend(self, lending: bool) -> None:
        """Lease rollouts from now on, or let leases wait."""
        self._lending = lending
        self._offer()

    def close(self) -> None:
        """End the run: nothing more is leased, and workers end."""
        self._closed = True
        self._offer()

    def stop(self) -> None:
        """End the server, not the run: requests that wait are refused, and may be sent again later."""
        self._stopped = True
        self.lend(False)
        self._wake()

    async def watch(self) -> None:
        """Look into the store until cancelled: end overdue attempts as lost, and see what other servers did."""
        sightings: Mapping[AttemptKey, _Sighting] = {}
        while True:
            pause = self._pause
            try:
                sightings = await self._look(sightings)
            except Exception as failed:
                # Nothing could be renewed meanwhile.
                sightings, pause = {}, _AFTER_FAILURE
                logger.error("Attempts cannot be watched: %s", failed, exc_info=not isinstance(failed, StoreError))
            self._wake()
            if self.queued:
                self._offer()
            await asyncio.sleep(pause)

    async def _look(self, sightings: Mapping[AttemptKey, _Sighting]) -> Mapping[AttemptKey, _Sighting]:
        ours = list(self.running.values())
        self.queued, leases = await self._store.leases()
        taken = [a for a in ours if a.key not in leases and a.closing is None]  # by another server
        ended = [self._end(active, CloseRequest(ending=Ending.LOST)) for active in taken]
        seen = {}
        for key, renewals in leases.items():
            seen[key] = sighting = sightings.get(key) or _Sighting()
            sighting.age += 1
            sighting.silence = sighting.silence + 1 if sighting.renewals == renewals else 0
            sighting.renewals = renewals
            if (error := self._why_lost(sighting)) and (active := await self._known(key)):
                error = f"The worker {active.record.worker} {error}."
                ended.append(self._end(active, CloseRequest(ending=Ending.LOST, error=error)))
        await asyncio.gather(*ended)
        return seen

    def _why_lost(self, sighting: _Sighting) -> str | None:
        if sighting.age * self._pause >= self._longest:
            return f"did not report within {self._longest:g} seconds"
        if sighting.renewals and sighting.silence * self._pause >= self._expiry:
            return f"sent no heartbeat for {self._expiry:g} seconds"
        return None

    async def _claim(self, request: LeaseRequest) -> list[tuple[Rollout, Attempt]]:
        until = asyncio.get_running_loop().time() + request.wait
        while not self._closed and not self._stopped:
            work = self._work
            renewals = int(request.worker in self._beating)
            if self._lending and (claimed := await self._store.claim(request.worker, request.capacity, renewals)):
                return claimed
            try:
                async with asyncio.timeout_at(until):
                    await work.wait()
            except TimeoutError:
                break
        return []

    def _leased(self, active: ActiveAttempt) -> Lease:
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
            prompts={**self._prompts, **active.rollout.prompts},
            secret=self._keys.of_lease(active.key),
            timeout=self._timeout,
            heartbeat=self._expiry / _HEARTBEATS_PER_LEASE,
        )

    async def _known(self, key: AttemptKey) -> ActiveAttempt | None:
        return self.attempts.get(key) or await self._recalled(key)

    async def _recalled(self, key: AttemptKey) -> ActiveAttempt | None:
        """An attempt from the store: it ended long ago, or another server leased it."""
        for record in await self._store.attempts(key.rollout):
            if record.key == key:
                rollout, ended = await self._store.rollout(key.rollout), record.ending is not None
                return ActiveAttempt(rollout, record, closed=ended, reported=record.ending)
        return None

    async def _end(self, active: ActiveAttempt, request: CloseRequest) -> CloseReply:
        """End an attempt; the first request decides how."""
        if active.record.ending is None:
            if active.closing is None:
                active.closed, active.reported = True, request.ending
                active.closing = asyncio.create_task(self._close(active, request))
            try:
                await asyncio.shield(active.closing)
            except Exception:
                active.closing = None
                raise
        counts = active.rollout.counted_attempt == active.record.attempt
        return CloseReply(counted=counts and request.ending is active.reported)

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
        is_first = await self._store.end(active.key, *reported(active.key, request), record, rollout)
        if is_first:
            active.rollout, active.record = rollout, record
        elif recalled := await self._recalled(active.key):  # Another server ended it.
            active.rollout, active.record, active.reported = recalled.rollout, recalled.record, recalled.reported
        active.closing = None
        active.forget()
        self.running.pop(active.key, None)
        self.attempts[active.key] = active
        self._closed_attempts.append(active.key)
        if len(self._closed_attempts) > MAX_REMEMBERED:
            self.attempts.pop(self._closed_attempts.popleft(), None)
        if is_first:
            self._hook.call(hooks.rollout_finished, rollout=rollout, attempt=record)
            if rollout.ending:
                self.ended = time.time()
        self._wake()
        if again:
            self._offer()

    def _wake(self) -> None:
        """Let `done` look again."""
        self._progress.set()
        self._progress = asyncio.Event()

    def _offer(self) -> None:
        """Let leases look again. Each look is a write, so there is none without need."""
        self._work.set()
        self._work = asyncio.Event()


def decided(attempt: ActiveAttempt, request: CloseRequest) -> tuple[Ending, str | None]:
    """The ending and error to record, by the worker's report and the gateway's own observations."""
    ending, error = request.ending, request.error
    was_gone = attempt.gone_after == attempt.completed_calls  # A call that was answered since did not break the agent.
    is_cut = was_gone and attempt.completed_calls > 0  # It caught the error, and ended without the policy's word.
    if (ending is Ending.FINISHED and is_cut) or (ending in _TRIED_AGAIN and (attempt.interrupted or was_gone)):
        return Ending.LOST, f"{_INTERRUPTED} {error or attempt.last_failure or ''}".rstrip()
    if ending is Ending.CRASHED and attempt.context_overflows:
        return Ending.CONTEXT_OVERFLOW, error
    if ending is not Ending.FINISHED or attempt.completed_calls:
        return ending, error
    if attempt.context_overflows:
        return Ending.CONTEXT_OVERFLOW, error or attempt.last_failure
    if attempt.last_failure:
        return Ending.NO_CALL, f"None of the agent's LLM calls got a reply. The last error was: {attempt.last_failure}"
    if attempt.started_calls:
        return Ending.NO_CALL, _NOT_AWAITED
    return Ending.NO_CALL, _NO_CALL + (f" It called {', '.join(request.bypassed)}." if request.bypassed else "")


def is_tried_again(attempt: ActiveAttempt, ending: Ending, budget: int) -> bool:
    """True if the rollout gets another of its `budget` attempts: this one was lost, or broke before a reply."""
    if attempt.record.attempt + 1 >= budget:
        return False
    return ending is Ending.LOST or (ending in _TRIED_AGAIN and attempt.completed_calls == 0)


def reported(key: AttemptKey, request: CloseRequest) -> list[Record]:
    """The agent side's report as records; rewards of one name for one call, or for none, add up."""
    tool_results = [
        # The agent's side has two sources, whatever it claims.
        replace(report, **key._asdict(), source=Source.COMMAND if report.source is Source.COMMAND else Source.ADAPTER)
        for report in request.tool_results
    ]
    totals = defaultdict[tuple[str, str | None], float](float)
    for reward in request.rewards:
        totals[reward.name, reward.call] += reward.value
    rewards = [Reward(*key, name, total, source="agent", call=call) for (name, call), total in totals.items()]
    return [*tool_results, *rewards]
