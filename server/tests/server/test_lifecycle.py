"""The lifecycle of rollouts: the real queue, held to it whatever happens in whatever order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_store import MemoryStore

from agl_core.errors import StoreError
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.types import Attempt, AttemptKey, Ending, Rollout, RolloutState
from agl_core.wire import CloseReply, CloseRequest, HeartbeatRequest, HeldAttempt, LeaseRequest
from agl_server.http.keys import Keys
from agl_server.queue import RolloutQueue

from .server_aids import Clock

ATTEMPTS = 3
KEYS = Keys()


class Lives(RuleBasedStateMachine):
    """Rollouts in the queues of two servers over one store: leased, reported (also late and twice), lost, cancelled,
    over failing writes, deaths of a server, and restarts of the run.

    Invariants are looked up in the store after each step; the model keeps only requests and answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = Clock(self.loop)
        self.store = MemoryStore()
        self.created: list[str] = []
        self.queues: list[RolloutQueue] = []
        self.watching: list[asyncio.Future[None]] = []
        self.leased: list[tuple[RolloutQueue, str, AttemptKey]] = []
        """The leased attempts with their servers and workers."""
        self.counting: set[AttemptKey] = set()
        self.endings: dict[AttemptKey, Ending] = {}

    @initialize()
    def begin(self) -> None:
        self.run(self.start_queues(2))

    async def start_queues(self, count: int) -> None:
        terms = {"timeout": 60, "attempts": ATTEMPTS, "grace": 10, "lease": 20}
        new = [RolloutQueue(self.store, hook=Plugins().hook, keys=KEYS, **terms) for _ in range(count)]
        self.queues += new
        self.watching += [asyncio.ensure_future(queue.watch()) for queue in new]
        await asyncio.sleep(0)

    async def kill_queues(self, count: int) -> None:
        dead, self.watching = self.watching[:count], self.watching[count:]
        for watching in dead:
            watching.cancel()
        await asyncio.wait(dead)
        self.queues = self.queues[count:]

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    async def if_it_can_be_written(self, awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        except StoreError:
            assert self.store.failing
            return None

    @rule(count=st.integers(1, 3), server=st.integers(0, 1))
    def create(self, count: int, server: int) -> None:
        ids = [f"r{len(self.created) + number}" for number in range(count)]

        async def add() -> None:
            await self.queues[server].enqueue([make.rollout(id) for id in ids])
            self.created += ids

        self.run(self.if_it_can_be_written(add()))

    @rule(worker=st.sampled_from("uvw"), capacity=st.integers(1, 4), servers=st.sampled_from([[0], [1], [0, 1]]))
    def lease(self, worker: str, capacity: int, servers: list[int]) -> None:
        async def ask(queue: RolloutQueue) -> None:
            reply = await queue.lease(LeaseRequest(worker=worker, capacity=capacity, wait=0))
            self.leased += [(queue, worker, AttemptKey(lease.rollout, lease.attempt)) for lease in reply.leases]

        async def ask_all() -> None:
            await asyncio.gather(*(ask(self.queues[server]) for server in servers))

        self.run(self.if_it_can_be_written(ask_all()))
        assert len({key for _, _, key in self.leased}) == len(self.leased), "an attempt was leased twice"

    @rule(worker=st.sampled_from("uvw"), server=st.integers(0, 1), data=st.data())
    def heartbeat(self, worker: str, server: int, data: st.DataObject) -> None:
        queue = self.queues[server]
        mine = [key for leasing, who, key in self.leased if (leasing, who) == (queue, worker)]
        named = data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []

        async def send() -> None:
            held = [HeldAttempt(**key._asdict(), secret=KEYS.of_lease(key)) for key in named]
            request = HeartbeatRequest(worker=worker, attempts=held)
            reply = await queue.heartbeat(request)
            assert all(
                self.endings.get(AttemptKey(attempt.rollout, attempt.attempt)) in (Ending.LOST, Ending.CANCELLED)
                for attempt in reply.lost
            )

        self.run(self.if_it_can_be_written(send()))

    @precondition(lambda self: self.leased)
    @rule(
        number=st.integers(0, 1000),
        ending=st.sampled_from([Ending.FINISHED, Ending.CRASHED, Ending.TIMED_OUT, Ending.LOST, Ending.CANCELLED]),
        calls=st.integers(0, 1),
        twice=st.booleans(),
    )
    def report(self, number: int, ending: Ending, calls: int, twice: bool) -> None:
        """Report any attempt that was ever leased: also one that was lost, superseded, or reported before.

        To the server that leased it, even if it is thought to be dead.
        """
        queue, _, key = self.leased[number % len(self.leased)]
        active = queue.attempts.get(key)
        if active is not None and not active.closed:
            active.completed_calls += calls

        async def send() -> None:
            request = CloseRequest(ending=ending, result="x")
            replies: list[CloseReply] = await asyncio.gather(
                *(queue.close_attempt(key, request) for _ in range(1 + twice))
            )
            assert len({reply.counted for reply in replies}) == 1
            if replies[0].counted:
                self.counting.add(key)

        self.run(self.if_it_can_be_written(send()))

    @precondition(lambda self: self.created)
    @rule(number=st.integers(0, 1000), server=st.integers(0, 1))
    def cancel(self, number: int, server: int) -> None:
        self.run(self.if_it_can_be_written(self.queues[server].cancel([self.created[number % len(self.created)]])))

    @rule()
    def abandon(self) -> None:
        self.run(self.if_it_can_be_written(self.queues[0].abandon("run")))

    @rule(seconds=st.sampled_from([1, 10, 21, 71]))
    def wait(self, seconds: int) -> None:
        self.run(self.clock.advance(seconds))

    @rule()
    def break_or_mend_the_store(self) -> None:
        self.store.failing = not self.store.failing

    @rule()
    def restart(self) -> None:
        async def again() -> None:
            await self.kill_queues(2)
            await self.start_queues(2)
            self.store.failing = False
            await self.queues[0].abandon("run")

        self.run(again())

    @rule()
    def replace_a_server(self) -> None:
        async def again() -> None:
            await self.kill_queues(1)
            await self.start_queues(1)

        self.run(again())

    @invariant()
    def every_rollout_is_somewhere(self) -> None:
        rollouts: list[Rollout] = self.run(self.store.rollouts())
        assert {rollout.id for rollout in rollouts} == set(self.created)
        waiting, leases = self.run(self.store.leases())
        assert waiting == sum(rollout.state is RolloutState.QUEUED for rollout in rollouts)
        running = sorted(rollout.id for rollout in rollouts if rollout.state is RolloutState.RUNNING)
        assert sorted(key.rollout for key in leases) == running

    @invariant()
    def every_rollout_ends_once_and_for_all(self) -> None:
        ended: set[str] = set()
        for record in self.store.written:
            if isinstance(record, Rollout):
                assert record.id not in ended, "written after its end"
                if record.state is RolloutState.DONE:
                    ended.add(record.id)

    @invariant()
    def at_most_one_attempt_counts(self) -> None:
        for rollout in self.run(self.store.rollouts()):
            attempts: list[Attempt] = self.run(self.store.attempts(rollout.id))
            assert [attempt.attempt for attempt in attempts] == list(range(len(attempts)))
            assert len(attempts) <= ATTEMPTS
            running = [attempt for attempt in attempts if attempt.ending is None]
            assert len(running) == (rollout.state is RolloutState.RUNNING)
            assert running in ([], attempts[-1:])
            for attempt in attempts:
                if attempt.ending is not None:
                    assert self.endings.setdefault(attempt.key, attempt.ending) is attempt.ending, (
                        "its ending was changed"
                    )
                if attempt.key in self.counting:
                    assert rollout.counted_attempt == attempt.attempt, "a superseded attempt was said to count"
            if rollout.state is RolloutState.DONE and rollout.counted_attempt is not None:
                assert rollout.counted_attempt == attempts[-1].attempt
                assert rollout.ending is attempts[-1].ending
            elif rollout.state is RolloutState.DONE:
                assert rollout.ending in (Ending.CANCELLED, Ending.LOST)
            else:
                assert (rollout.counted_attempt, rollout.ending) == (None, None)

    def teardown(self) -> None:
        """Whatever happened, workers that do their work bring every rollout to its end."""
        if not self.queues:
            self.loop.close()
            return

        async def finish() -> None:
            self.store.failing = False
            for _ in range(1 + ATTEMPTS):
                await self.clock.advance(71)  # what nobody reports is lost
                for lease in (await self.queues[0].lease(LeaseRequest(worker="z", capacity=4096, wait=0))).leases:
                    key = AttemptKey(lease.rollout, lease.attempt)
                    await self.queues[0].close_attempt(key, CloseRequest(ending=Ending.FINISHED))
            assert sorted(rollout.id for rollout in await self.queues[1].done(self.created)) == sorted(self.created)

        try:
            self.run(finish())
        finally:
            self.run(self.kill_queues(2))
        self.every_rollout_is_somewhere()
        self.every_rollout_ends_once_and_for_all()
        self.at_most_one_attempt_counts()
        self.loop.close()


TestLives = Lives.TestCase
TestLives.settings = settings(stateful_step_count=30)
