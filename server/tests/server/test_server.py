"""The server's port and routes, an engine that comes and goes, the whole of it over the real store, and its keys."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from agl_core.capture.requests import HEADER_ROLLOUT
from agl_core.client.worker import LightningClient, UnreachableError
from agl_core.errors import ServerError
from agl_core.protocols import Upstream
from agl_core.testing import episodes as make
from agl_core.testing.scripts import Hold
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import AttemptKey, Ending, Run
from agl_core.wire import (
    CLOSE,
    HEALTH,
    HEARTBEAT,
    LEASE,
    AttemptRef,
    CloseRequest,
    Empty,
    HeartbeatRequest,
    HeldAttempt,
    LeaseRequest,
)
from agl_server.http.keys import Keys
from agl_server.server import LightningServer
from agl_server.store.sqlite import SqliteStore
from agl_server.testing import Stack, running_stack, until

from .server_aids import GOOD, HELLO, SMALLEST


async def test_a_worker_that_went_away_is_lent_nothing(stack: Stack) -> None:
    async with LightningClient(stack.server.base_url, stack.server.worker_key) as client:
        waiting = asyncio.ensure_future(client.ask(LEASE, LeaseRequest(worker="w", capacity=1, wait=60)))
        await until(lambda: stack.server.queue.waiting == 1)
        waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: stack.server.queue.waiting == 0)
    await stack.server.queue.enqueue([make.rollout("a")])
    assert not stack.server.queue.running
    assert (await stack.server.queue.lease(LeaseRequest(worker="v", capacity=1, wait=0))).leases


async def test_a_taken_port_says_so(stack: Stack) -> None:
    port = int(stack.server.base_url.rpartition(":")[2])
    with pytest.raises(ServerError, match=f"127.0.0.1:{port}.*use port 0"):
        async with running_stack(port=port):
            pass


async def test_stopping_ends_calls_in_flight_and_frees_the_port() -> None:
    async with running_stack() as stack:
        key = await stack.lease()
        hold = Hold()
        stack.upstream.script(hold)
        asking = asyncio.ensure_future(stack.client(key).chat.completions.create(**GOOD))
        await hold.arrived.wait()
        server: LightningServer = stack.server
        await server.stop()
        with pytest.raises(openai.InternalServerError, match="stopping"):
            await asking
        await server.stop()
        hold.release.set()
        async with running_stack(port=int(server.base_url.rpartition(":")[2])):
            pass


ALL = LeaseRequest(worker="w", capacity=9, wait=0)


def engine(upstream: ScriptedUpstream) -> Upstream:
    return Upstream(urls=(upstream.url,), models={"default": "served"}, api_key="engine-key")


@pytest.fixture
async def empty(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    """A server without an engine, which looks into its store again and again."""
    monkeypatch.setattr("agl_server.queue._LONGEST_PAUSE", 0.05)
    async with ScriptedUpstream() as upstream, running_stack(upstream=None) as stack:
        yield replace(stack, upstream=upstream)


async def test_the_next_restart_ends_what_the_last_one_left(empty: Stack) -> None:
    runs = [Run("run", 0, 1.0, {"name": "run"}, None), Run("run", 1, 2.0, {"name": "run"}, 7)]
    server = empty.server
    await server.begin(runs[0])
    server.serve(engine(empty.upstream), {})
    await server.queue.enqueue([make.rollout("queued"), make.rollout("running")])
    await server.queue.lease(LeaseRequest(worker="w", capacity=1))
    await server.begin(runs[1])
    assert [rollout.ending for rollout in await empty.store.rollouts()] == [Ending.LOST, Ending.LOST]
    assert not server.queue.running
    assert await empty.store.runs() == runs
    await server.queue.enqueue([make.rollout("new", restart=1)])
    assert not (await server.queue.lease(ALL)).leases, "its engine does not serve yet"


async def test_until_there_is_an_engine_rollouts_wait_and_calls_are_to_be_tried_later(empty: Stack) -> None:
    server, queue = empty.server, empty.server.queue
    server.serve(engine(empty.upstream), {})
    await queue.enqueue([make.rollout("a"), make.rollout("b")])
    [lease] = (await queue.lease(LeaseRequest(worker="w", capacity=1))).leases
    server.relay.disconnect()
    async with httpx.AsyncClient(trust_env=False, headers={"x-api-key": lease.key}) as agent:
        for path, body in (("chat/completions", {"messages": HELLO}), ("messages", {"messages": HELLO})):
            url = f"{server.base_url}{lease.path}/v1/{path}"
            refused = await agent.post(url, json={"model": "default", "max_tokens": 9, **body})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            assert "No engine serves a model now" in refused.text
    waiting = asyncio.ensure_future(queue.lease(LeaseRequest(worker="w", capacity=1, wait=60)))
    await until(lambda: queue.waiting)
    async with LightningClient(server.base_url, server.keys.operator) as operator:
        await until(lambda: queue.queued == 1)
        activity = await operator.ask(HEALTH, Empty())
        assert (activity.serving, activity.queued, activity.running, activity.waiting) == (False, 1, 1, 1)
        assert [attempt.rollout for attempt in activity.attempts] == ["a"]
        server.serve(engine(empty.upstream), {})
        assert [lease.rollout for lease in (await waiting).leases] == ["b"]
        await queue.enqueue([make.rollout("c"), make.rollout("d")])
        await until(lambda: queue.queued == 2)
        activity = await operator.ask(HEALTH, Empty())
        assert (activity.serving, activity.queued, activity.running, activity.waiting) == (True, 2, 2, 0)
        assert activity.counters == {}
    assert await empty.client(AttemptKey("a", 0)).chat.completions.create(**GOOD), "the client may try again"


async def test_the_end_of_the_server_is_not_the_end_of_the_run(empty: Stack) -> None:
    server = empty.server
    async with LightningClient(server.base_url, server.worker_key) as worker:
        leasing = asyncio.ensure_future(worker.ask(LEASE, LeaseRequest(worker="w", capacity=1, wait=60)))
        await until(lambda: server.queue.waiting)
        await server.stop(over=False)
        reply = await leasing
        assert (reply.leases, reply.closed) == ([], False)
        with pytest.raises(UnreachableError):
            await worker.ask(LEASE, ALL)


async def test_each_key_opens_its_own_doors_only(stack: Stack, http: httpx.AsyncClient) -> None:
    own, other = await stack.lease(), await stack.lease()
    keys = stack.server.keys
    everybodys = (keys.operator, keys.worker, keys.of_lease(own), keys.of_lease(other), keys.of_attempt(own), "none")
    close = f"rollouts/{own.rollout}/attempts/0/close"
    doors = {
        ("POST", "leases"): {keys.worker},
        ("POST", "heartbeats"): {keys.worker},
        ("POST", close): {keys.of_lease(own)},
        ("GET", "health"): {keys.worker, keys.operator},
    }
    for (method, path), whose in doors.items():
        for key in (*everybodys, keys.operator[:-1], keys.worker + "x", "schlüssel"):
            url, headers = f"{stack.server.base_url}/agl/v1/{path}", {"Authorization": f"Bearer {key}".encode()}
            answer = await http.request(method, url, content=b"{", headers=headers)
            assert (answer.status_code != 401) is (key in whose), (path, key)
    with pytest.raises(openai.AuthenticationError):
        await stack.client(own, api_key=keys.operator).chat.completions.create(model="default", messages=HELLO)


async def test_the_document_names_every_operation_and_body(stack: Stack, http: httpx.AsyncClient) -> None:
    document = (await http.get(f"{stack.server.base_url}/openapi.json")).json()
    for operation in (LEASE, HEARTBEAT, CLOSE, HEALTH):
        described = document["paths"][operation.path][operation.method.lower()]
        schema = described["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        assert schema.rpartition("/")[2] == operation.reply.__name__
        assert ("requestBody" in described) is operation.has_body
        assert operation.reply.__name__ in document["components"]["schemas"]


# Who may do what: the workers' key, each attempt's own key, and where the server may listen.


def test_an_attempts_key_is_made_of_the_secret() -> None:
    """The same as openssl's: printf agent/r/0 | openssl dgst -sha256 -hmac secret -binary | base64, made URL-safe."""
    keys = Keys(worker="w", secret="secret")
    assert keys.of_attempt(AttemptKey("r", 0)) == "agl-2E9EX4mwhTGrFul1YaP193hjtO8wEhWUZEKpgLGmGBY"
    assert keys.of_lease(AttemptKey("r", 0)) == "agl-snl1YqPNTSf0E8cltP3Ll4-kUldESI9RgveYy0kZoI8"
    attempts = [AttemptKey(*parts) for parts in (("r", 0), ("r", 1), ("s", 0), ("lease/r", 0), ("agent/r", 0))]
    several = {make(key) for key in attempts for make in (keys.of_attempt, keys.of_lease)}
    assert len(several | {Keys(secret="another").of_attempt(AttemptKey("r", 0))}) == 11


async def test_only_the_secret_of_its_lease_keeps_an_attempt(stack: Stack) -> None:
    keys = stack.server.keys
    own, other = await stack.lease(), await stack.lease()
    held_own, held_other = (HeldAttempt(**key._asdict(), secret=keys.of_lease(key)) for key in (own, other))
    async with LightningClient(stack.server.base_url, keys.worker) as worker:
        for secret in (keys.of_attempt(own), keys.of_lease(other), keys.worker, ""):
            forged = HeldAttempt(rollout=own.rollout, attempt=0, secret=secret)
            reply = await worker.ask(HEARTBEAT, HeartbeatRequest(worker="w", attempts=[forged, held_other]))
            assert reply.lost == [AttemptRef(rollout=own.rollout, attempt=0)]
        _, before = await stack.store.leases()
        assert (await worker.ask(HEARTBEAT, HeartbeatRequest(worker="w", attempts=[held_own]))).lost == []
        assert await stack.store.leases() == (0, {own: before[own] + 1, other: before[other]})


async def test_an_attempts_key_is_good_for_that_attempt_only(stack: Stack, http: httpx.AsyncClient) -> None:
    own, other = await stack.lease(), await stack.lease()
    key = stack.server.keys.of_attempt(own)
    for scheme in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
        for path, body in SMALLEST.items():
            for status, url, headers in (
                (401, stack.url(other), {}),
                (401, stack.url(), {HEADER_ROLLOUT: f"{other.rollout}/{other.attempt}"}),
                (401, stack.url(AttemptKey(own.rollout, 1)), {}),
                (401, stack.url(AttemptKey("nobody", 0)), {}),
                (200, stack.url(own), {}),
                (200, stack.url(), {HEADER_ROLLOUT: f"{own.rollout}/{own.attempt}"}),
                (200, stack.url(), {}),
            ):
                answer = await http.post(f"{url}/{path}", json=body, headers={**scheme, **headers})
                assert answer.status_code == status, (url, headers)
                assert ("API key" in answer.text) is (status == 401)
    mixed = {"Authorization": f"Bearer {key}", HEADER_ROLLOUT: f"{other.rollout}/{other.attempt}"}
    assert (await http.post(f"{stack.url(own)}/chat/completions", json=GOOD, headers=mixed)).status_code == 400
    assert await stack.calls(other) == []
    assert len(await stack.calls(own)) == 24


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.invalid"])
async def test_it_does_not_listen_elsewhere_without_a_key_of_your_choice(host: str) -> None:
    with pytest.raises(ServerError, match=rf"{host}.*AGL_WORKER_KEY"):
        async with running_stack(host=host):
            pass


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
async def test_it_listens_on_any_loopback_address(host: str) -> None:
    async with running_stack(host=host) as stack:
        await stack.client(await stack.lease()).chat.completions.create(**GOOD)


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("AGL_WORKER_KEY", "AGL_OPERATOR_KEY"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.usefixtures("no_keys")
def test_keys_survive_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    first = Keys.of_run(file)
    first.write(file, "http://127.0.0.1:1")
    again = Keys.of_run(file)
    assert again == first
    assert not again.chosen
    again.write(file, "http://127.0.0.1:2")
    of_keys = {"worker_key": first.worker, "operator_key": first.operator, "agent_secret": first.secret}
    assert json.loads(file.read_text()) == {
        **of_keys, "base_url": "http://127.0.0.1:2", "begun": False, "over": False
    }  # fmt: skip
    assert len({*of_keys.values(), Keys.of_run(tmp_path / "another.json").worker}) == 4
    file.write_text("{")
    assert Keys.of_run(file).secret != first.secret


def test_a_key_of_your_choice_comes_first_and_is_not_written_down(tmp_path: Path, no_keys: pytest.MonkeyPatch) -> None:
    file, generated = tmp_path / "server.json", Keys()
    generated.write(file, "http://127.0.0.1:1")

    def keys(worker: str, operator: str) -> Keys:
        """Those of a run that finds these in its environment, from which it takes them."""
        no_keys.setenv("AGL_WORKER_KEY", worker)
        no_keys.setenv("AGL_OPERATOR_KEY", operator)
        return Keys.of_run(file)

    chosen = keys("  chosen-by-me\n", " ")
    assert (chosen.worker, chosen.operator, chosen.secret) == ("chosen-by-me", generated.operator, generated.secret)
    assert chosen.chosen == {"AGL_WORKER_KEY"}
    keys("chosen-by-me", "chosen-too").write(file, "http://127.0.0.1:1")
    assert "chosen" not in file.read_text()
    for worker, problem in (("chosen-too", "are the same"), ("schlüssel", "ASCII")):
        with pytest.raises(ServerError, match=problem):
            keys(worker, "chosen-too")


async def test_keys_are_neither_stored_nor_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "store.sqlite"
    async with SqliteStore(path) as store, running_stack(store=store) as stack:
        keys = stack.server.keys
        await stack.server.queue.enqueue([make.rollout("a")])
        async with LightningClient(stack.server.base_url, stack.server.worker_key) as client:
            (lease,) = (await client.ask(LEASE, LeaseRequest(worker="w", capacity=1))).leases
            key = AttemptKey("a", 0)
            await stack.client(key, api_key=lease.key).chat.completions.create(**GOOD)
            with pytest.raises(openai.AuthenticationError):
                await stack.client(AttemptKey("b", 0), api_key=lease.key).chat.completions.create(**GOOD)
            await client.ask(CLOSE, CloseRequest(ending=Ending.FINISHED), lease)
        secrets = [keys.worker, keys.operator, keys.secret, lease.key, lease.secret]
        stored = await asyncio.to_thread(lambda: b"".join(file.read_bytes() for file in tmp_path.iterdir()))
    assert b"hello" in stored
    assert [secret for secret in secrets if secret.encode() in stored] == []
    sent = [f"{dict(received.body)} {received.headers}" for received in stack.upstream.received]
    told = "\n".join([caplog.text, repr(keys), *sent])
    assert sent
    assert [secret for secret in secrets if secret in told] == []
