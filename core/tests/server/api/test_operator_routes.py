"""A trainer apart: it begins a run, says where its engine serves, has rollouts run, and may die at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from agl_core.client import BlockingClient, LightningClient, RefusedError, UnreachableError
from agl_core.config.models import SamplingSection
from agl_core.errors import StoreRefusedError
from agl_core.server import Keys
from agl_core.store.sqlite import SqliteStore
from agl_core.testing import episodes as make
from agl_core.testing.scripts import Hold
from agl_core.testing.server import Stack, running_stack, until
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import Attempt, AttemptKey, Ending, Reward, Rollout, RolloutState, Run
from agl_core.wire.trainers import (
    BEGIN,
    FINISH,
    PUBLISH,
    SERVE,
    BeginRequest,
    FinishRequest,
    RecordsQuery,
    Registration,
    RolloutQuery,
    RolloutsQuery,
    RunSettings,
    RunsQuery,
    VersionsRequest,
)
from agl_core.wire.workers import (
    HEARTBEAT,
    LEASE,
    AttemptRef,
    CloseRequest,
    HeartbeatRequest,
    HeldAttempt,
    LeaseRequest,
)

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ALL = LeaseRequest(worker="w", capacity=9, wait=0)
FINISHED = CloseRequest(ending=Ending.FINISHED)


def beginning(started: float = 1.0, run: str = "run", step: int | None = None) -> BeginRequest:
    return BeginRequest(run=run, started=started, config={"name": run}, resumed_step=step)


def registration(upstream: ScriptedUpstream, restart: int = 0, **changes: Any) -> Registration:
    settings = RunSettings(sampling=SamplingSection(temperature=0.25), seed=5, timeout=20, attempts=1, agents={})
    fields: dict[str, Any] = {
        "restart": restart,
        "urls": (upstream.url,),
        "models": {"default": "served"},
        "api_key": "engine-key",
        "versions": {"default": 3},
        "settings": settings,
        "expires": 60,
    }
    return Registration(**{**fields, **changes})


@pytest.fixture
async def empty() -> AsyncIterator[Stack]:
    """A server that no trainer has spoken to."""
    async with ScriptedUpstream() as upstream, running_stack(upstream=None) as stack:
        yield replace(stack, upstream=upstream)


def operator(stack: Stack) -> LightningClient:
    return LightningClient(stack.server.base_url, stack.server.keys.operator)


async def call(stack: Stack, key: AttemptKey) -> Any:
    return await stack.client(key).chat.completions.create(model="default", messages=HELLO)


async def test_a_trainer_has_rollouts_run_by_its_engine_with_its_settings(empty: Stack) -> None:
    async with operator(empty) as trainer:
        assert (await trainer.ask(BEGIN, beginning())).restart == 0
        await trainer.ask(SERVE, registration(empty.upstream))
        rollouts = [make.rollout(id, task=replace(make.rollout("x").task, input=id)) for id in "ab"]
        for _ in range(2):
            await trainer.enqueue(rollouts)
        asking = asyncio.ensure_future(trainer.done(["a", "b"], wait=60))
        queue = empty.server.queue
        leases = (await queue.lease(ALL)).leases
        assert [(each.rollout, each.task_input, each.timeout) for each in leases] == [("a", "a", 20), ("b", "b", 20)]
        await call(empty, AttemptKey("b", 0))
        assert empty.upstream.received[0].headers["Authorization"] == "Bearer engine-key"
        assert empty.upstream.received[0].body["temperature"] == 0.25
        assert (await empty.calls(AttemptKey("b", 0)))[0].version == 3
        await trainer.ask(PUBLISH, VersionsRequest(restart=0, versions={"default": 4}))
        await call(empty, AttemptKey("b", 0))
        assert [each.version for each in await empty.calls(AttemptKey("b", 0))] == [3, 4]

        await queue.close_attempt(AttemptKey("b", 0), FINISHED)
        [done] = await asking
        assert done == replace(rollouts[1], state=RolloutState.DONE, ending=Ending.FINISHED, counted_attempt=0)
        assert await trainer.done(["a"], wait=0.01) == []
        await trainer.cancel(["a", "nobody"])
        assert {each.id: each.ending for each in await trainer.done(["a", "b"])} == {
            "a": Ending.CANCELLED,
            "b": Ending.FINISHED,
        }


async def test_until_there_is_an_engine_rollouts_wait_and_calls_are_to_be_tried_later(empty: Stack) -> None:
    async with operator(empty) as trainer:
        await trainer.ask(BEGIN, beginning())
        await trainer.ask(SERVE, registration(empty.upstream))
        await trainer.enqueue([make.rollout("a"), make.rollout("b")])
        [lease] = (await empty.server.queue.lease(LeaseRequest(worker="w", capacity=1))).leases
        await trainer.ask(FINISH, FinishRequest(restart=0, over=False))
        async with httpx.AsyncClient(trust_env=False, headers={"x-api-key": lease.key}) as agent:
            for path, body in (("chat/completions", {"messages": HELLO}), ("messages", {"messages": HELLO})):
                url = f"{empty.server.base_url}{lease.path}/v1/{path}"
                refused = await agent.post(url, json={"model": "default", "max_tokens": 9, **body})
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
                assert "agl train" in refused.text
        waiting = asyncio.ensure_future(empty.server.queue.lease(LeaseRequest(worker="w", capacity=1, wait=60)))
        await until(lambda: empty.server.queue.waiting)
        assert not (await trainer.health()).serving
        await trainer.ask(SERVE, registration(empty.upstream))
        assert [each.rollout for each in (await waiting).leases] == ["b"]
        assert (await trainer.health()).serving
        reply = await call(empty, AttemptKey("a", 0))
        assert reply.choices[0].message.content, "the client may try again"


async def test_a_trainer_that_is_not_heard_of_is_gone_until_it_is_back(empty: Stack) -> None:
    async with operator(empty) as trainer:
        await trainer.ask(BEGIN, beginning())
        await trainer.ask(SERVE, registration(empty.upstream, expires=0.3))
        await trainer.enqueue([make.rollout("a")])
        while (await trainer.health()).serving:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not (await empty.server.queue.lease(ALL)).leases
        await trainer.ask(SERVE, registration(empty.upstream, expires=60))
        assert (await empty.server.queue.lease(ALL)).leases


async def test_another_engine_takes_over_and_calls_of_the_first_end(empty: Stack) -> None:
    async with operator(empty) as trainer, ScriptedUpstream() as second:
        await trainer.ask(BEGIN, beginning())
        await trainer.ask(SERVE, registration(empty.upstream))
        await trainer.enqueue([make.rollout("a")])
        await empty.server.queue.lease(ALL)
        hold = Hold()
        empty.upstream.script(hold)
        asking = asyncio.ensure_future(call(empty, AttemptKey("a", 0)))
        await hold.arrived.wait()
        await trainer.ask(SERVE, registration(second))
        await call(empty, AttemptKey("a", 0))
        assert len(second.received) == 1
        hold.release.set()
        await asyncio.gather(asking, return_exceptions=True)


async def test_the_next_restart_ends_what_the_last_one_left_and_is_the_only_one_heard(empty: Stack) -> None:
    async with operator(empty) as first, operator(empty) as second:
        await first.ask(BEGIN, beginning(1.0))
        await first.ask(SERVE, registration(empty.upstream))
        await first.enqueue([make.rollout("queued"), make.rollout("running")])
        await empty.server.queue.lease(LeaseRequest(worker="w", capacity=1))
        for _ in range(2):  # its answer may have been lost
            assert (await second.ask(BEGIN, beginning(2.0, step=7))).restart == 1
        assert [each.ending for each in await empty.store.rollouts()] == [Ending.LOST, Ending.LOST]
        assert empty.server.queue.queued == empty.server.queue.running == 0
        runs = [Run("run", 0, 1.0, {"name": "run"}, None), Run("run", 1, 2.0, {"name": "run"}, 7)]
        assert await second.query(RunsQuery()) == runs
        for late in (
            first.ask(SERVE, registration(empty.upstream)),
            first.ask(PUBLISH, VersionsRequest(restart=0, versions={})),
            first.enqueue([make.rollout("late")]),
            first.ask(FINISH, FinishRequest(restart=0, over=True)),
        ):
            with pytest.raises(RefusedError, match=r"409.*restart 1 has begun since"):
                await late
        with pytest.raises(RefusedError, match=r"409.*serves the run 'run', not 'other'"):
            await second.ask(BEGIN, beginning(3.0, run="other"))
        with pytest.raises(RefusedError, match=r"409.*serves the run 'run', not 'other'"):
            await second.enqueue([make.rollout("new", run="other", restart=1)])
        await second.ask(SERVE, registration(empty.upstream, 1))
        await second.enqueue([make.rollout("new", restart=1)])
        assert [each.rollout for each in (await empty.server.queue.lease(ALL)).leases] == ["new"]


async def test_workers_end_when_the_run_is_over_and_another_trainer_may_go_on(empty: Stack) -> None:
    async with operator(empty) as trainer:
        with pytest.raises(RefusedError, match="No trainer has begun"):
            await trainer.ask(SERVE, registration(empty.upstream))
        await trainer.ask(BEGIN, beginning())
        await trainer.ask(FINISH, FinishRequest(restart=0, over=True))
        assert (await empty.server.queue.lease(ALL)).closed
        with pytest.raises(RefusedError, match="the run is over"):
            await trainer.enqueue([make.rollout("a")])
        await trainer.ask(BEGIN, beginning(2.0))
        assert not (await empty.server.queue.lease(ALL)).closed


async def test_a_server_that_is_killed_is_taken_up_by_the_next_one(tmp_path: Path) -> None:
    keys = Keys()
    options: dict[str, Any] = {"upstream": None, "keys": keys, "run": "run", "attempts": 2}
    async with ScriptedUpstream() as upstream:
        async with SqliteStore(tmp_path / "s") as store, running_stack(store=store, **options) as stack:
            async with LightningClient(stack.server.base_url, keys.operator) as trainer:
                await trainer.ask(BEGIN, beginning())
                await trainer.ask(SERVE, registration(upstream))
                await trainer.enqueue([make.rollout(id) for id in ("done", "held", "queued")])
                done, held = (await stack.server.queue.lease(LeaseRequest(worker="w", capacity=2))).leases
                await stack.server.queue.close_attempt(AttemptKey("done", 0), CloseRequest(ending=Ending.CANCELLED))
            await stack.server.stop(over=False)  # what a kill leaves is the same: nothing is written at the end
        async with (
            SqliteStore(tmp_path / "s") as store,
            running_stack(store=store, **options) as stack,
            LightningClient(stack.server.base_url, keys.operator) as trainer,
        ):
            assert (await trainer.health()).restart == 0
            assert not (await stack.server.queue.lease(ALL)).leases, "the trainer was not heard of yet"
            await trainer.enqueue([make.rollout(id) for id in ("done", "held", "queued")])
            assert [each.id for each in await trainer.done(["done", "held", "queued"])] == ["done"]
            await trainer.ask(SERVE, registration(upstream))
            async with LightningClient(stack.server.base_url, keys.worker) as worker:
                beat = HeartbeatRequest(worker="w", attempts=[stack.held(AttemptKey("held", 0))])
                assert (await worker.ask(HEARTBEAT, beat)).lost == []
                assert [each.rollout for each in (await worker.ask(LEASE, ALL)).leases] == ["queued"]
                await call(stack, AttemptKey("held", 0))
                await worker.close_attempt(held, FINISHED)
            [rollout] = await trainer.done(["held"])
            assert (rollout.ending, rollout.counted_attempt) == (Ending.FINISHED, 0)
    assert held.key == keys.of_attempt(AttemptKey("held", 0))
    assert done.key != held.key


async def test_the_end_of_the_server_is_not_the_end_of_the_run(empty: Stack) -> None:
    async with operator(empty) as trainer, LightningClient(empty.server.base_url, empty.server.worker_key) as worker:
        await trainer.ask(BEGIN, beginning())
        await trainer.ask(SERVE, registration(empty.upstream))
        await trainer.enqueue([make.rollout("a")])
        await worker.ask(LEASE, ALL)
        leasing = asyncio.ensure_future(worker.ask(LEASE, LeaseRequest(worker="w", capacity=1, wait=60)))
        asking = asyncio.ensure_future(trainer.done(["a"], wait=60))
        await until(lambda: empty.server.queue.waiting)
        await empty.server.stop(over=False)
        reply = await leasing
        assert (reply.leases, reply.closed) == ([], False)
        with pytest.raises(UnreachableError):
            await asking
        with pytest.raises(UnreachableError):
            await worker.ask(LEASE, ALL)


async def test_records_are_written_and_read(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "s") as store, running_stack(store=store) as stack, operator(stack) as client:
        rollouts = [make.rollout("r1"), make.rollout("r2", step=4)]
        records: list[Any] = [*rollouts, Attempt("r1", 0, "w", 1.0), Reward("r1", 0, "n", 0.5, "s")]
        for _ in range(2):
            await client.put(records)
        assert await store.rollouts() == records[:2]
        assert await client.query(RolloutsQuery(step=4)) == [records[1]]
        keys = [AttemptRef(rollout="r1", attempt=0)]
        assert await client.query(RecordsQuery(kind="rewards", attempts=keys)) == [records[3]]
        assert await client.query(RecordsQuery(kind="calls", attempts=keys)) == []
        with pytest.raises(RefusedError, match=r"422.*r1, r2"):
            await client.query(RolloutQuery(prefix="r"))
        with pytest.raises(RefusedError, match=r"422.*Only rollouts"):
            await client.enqueue([records[2]])
        with pytest.raises(StoreRefusedError, match=r"Reward .*NUL"):
            await client.put([Reward("r\0", 0, "n", 0.5, "s")])


async def test_code_that_blocks_has_the_same_client(stack: Stack) -> None:
    def work(url: str, worker_key: str, operator_key: str) -> list[Rollout]:
        with BlockingClient(url, operator_key) as trainer, BlockingClient(url, worker_key) as worker:
            assert trainer.ask(BEGIN, beginning()).restart == 0
            trainer.ask(SERVE, registration(stack.upstream))
            trainer.ask(PUBLISH, VersionsRequest(restart=0, versions={"default": 9}))
            trainer.enqueue([make.rollout("a"), make.rollout("b")])
            trainer.cancel(["b"])
            [lease] = worker.ask(LEASE, ALL).leases
            held = [HeldAttempt(rollout=lease.rollout, attempt=lease.attempt, secret=lease.secret)]
            assert worker.ask(HEARTBEAT, HeartbeatRequest(worker="w", attempts=held)).lost == []
            assert worker.close_attempt(lease, CloseRequest(ending=Ending.CANCELLED)).counted
            trainer.put([Reward("a", 0, "n", 0.5, "s")])
            assert len(trainer.query(RunsQuery())) == 1
            assert worker.health().queued == 0
            found = trainer.done(["a", "b"], wait=1)
            trainer.ask(FINISH, FinishRequest(restart=0, over=True))
            assert worker.ask(LEASE, ALL).closed
            return found

    keys = stack.server.keys
    done = await asyncio.to_thread(work, stack.server.base_url, keys.worker, keys.operator)
    assert {each.id: each.ending for each in done} == {"a": Ending.CANCELLED, "b": Ending.CANCELLED}
    assert stack.server.versions == {"default": 9}


OPERATORS = [
    ("POST", "runs"), ("POST", "runs/finish"), ("PUT", "upstream"), ("PUT", "versions"), ("POST", "rollouts"),
    ("POST", "rollouts/done"), ("POST", "rollouts/cancel"), ("POST", "store/records"), ("POST", "store/query"),
]  # fmt: skip


async def test_each_key_opens_its_own_doors_only(stack: Stack) -> None:
    own = await stack.lease()
    keys = stack.server.keys
    async with httpx.AsyncClient(base_url=f"{stack.server.base_url}/agl/v1/", trust_env=False) as http:

        async def status(method: str, path: str, key: str) -> int:
            sent = await http.request(method, path, content=b"{", headers={"Authorization": f"Bearer {key}"})
            return sent.status_code

        for method, path in OPERATORS:
            assert await status(method, path, keys.operator) == 422, path
            others = (keys.worker, keys.of_lease(own), keys.of_attempt(own), "none")
            for key in (*others, keys.operator[:-1], keys.operator + "x"):
                assert await status(method, path, key) == 401, (path, key)
        for path in ("leases", "heartbeats", f"rollouts/{own.rollout}/attempts/0/close"):
            assert await status("POST", path, keys.operator) == 401, path
        for key, expected in (
            (keys.operator, 200),
            (keys.worker, 200),
            (keys.of_lease(own), 401),
            (keys.of_attempt(own), 401),
        ):
            assert await status("GET", "health", key) == expected
    with pytest.raises(openai.AuthenticationError):
        await stack.client(own, api_key=keys.operator).chat.completions.create(model="default", messages=HELLO)


@pytest.mark.parametrize(
    "url",
    ["http://[Í)", "http://[", "http://[::1", "http://a b/v1", "http://host:99999/v1", "ftp://host", "http:///v1"],
)
def test_an_engine_needs_an_address(url: str) -> None:
    with pytest.raises(ValidationError):
        registration(ScriptedUpstream(), urls=(url,))


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "http://[::1]:8000/v1", "https://host-1.example/a/v1"])
def test_addresses_of_engines(url: str) -> None:
    assert registration(ScriptedUpstream(), urls=(url,)).urls == (url,)
