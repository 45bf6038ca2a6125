"""Who may do what: the workers' key, each attempt's own key, and where the server may listen."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from agl_core.capture.requests import HEADER_ROLLOUT
from agl_core.errors import ServerError
from agl_core.server import Keys
from agl_core.store.sqlite import SqliteStore
from agl_core.testing import episodes as make
from agl_core.testing.server import Stack, running_stack
from agl_core.types import AttemptKey, Ending
from agl_core.wire import (
    HEARTBEAT,
    LEASE,
    AttemptRef,
    CloseRequest,
    HeartbeatRequest,
    HeldAttempt,
    LeaseRequest,
)
from agl_core.worker.client import LightningClient

from .posting import GOOD, SMALLEST, open_attempt


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False) as client:
        yield client


def test_an_attempts_key_is_made_of_the_secret() -> None:
    """As openssl has it: printf agent/r/0 | openssl dgst -sha256 -hmac secret -binary | base64, made URL-safe."""
    keys = Keys(worker="w", secret="secret")
    assert keys.of_attempt(AttemptKey("r", 0)) == "agl-2E9EX4mwhTGrFul1YaP193hjtO8wEhWUZEKpgLGmGBY"
    assert keys.of_lease(AttemptKey("r", 0)) == "agl-snl1YqPNTSf0E8cltP3Ll4-kUldESI9RgveYy0kZoI8"
    attempts = [AttemptKey(*parts) for parts in (("r", 0), ("r", 1), ("s", 0), ("lease/r", 0), ("agent/r", 0))]
    several = {make(key) for key in attempts for make in (keys.of_attempt, keys.of_lease)}
    assert len(several | {Keys(secret="another").of_attempt(AttemptKey("r", 0))}) == 11


async def test_only_the_secret_of_its_lease_keeps_an_attempt(stack: Stack) -> None:
    keys = stack.server.keys
    own, other = await stack.lease(), await stack.lease()
    active = open_attempt(stack.server.queue, own)
    held_own, held_other = (HeldAttempt(**key._asdict(), secret=keys.of_lease(key)) for key in (own, other))
    async with LightningClient(stack.server.base_url, keys.worker) as worker:
        for secret in (keys.of_attempt(own), keys.of_lease(other), keys.worker, ""):
            forged = HeldAttempt(rollout=own.rollout, attempt=0, secret=secret)
            reply = await worker.ask(HEARTBEAT, HeartbeatRequest(worker="w", attempts=[forged, held_other]))
            assert reply.lost == [AttemptRef(rollout=own.rollout, attempt=0)]
        before = active.due
        assert (await worker.ask(HEARTBEAT, HeartbeatRequest(worker="w", attempts=[held_own]))).lost == []
        assert active.due > before


async def test_an_attempts_key_is_good_for_that_attempt_only(stack: Stack, http: httpx.AsyncClient) -> None:
    own, other = await stack.lease(), await stack.lease()
    key = stack.server.keys.of_attempt(own)
    for scheme in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
        for path, body in SMALLEST.items():
            for url, headers in (
                (stack.url(other), {}),
                (stack.url(), {HEADER_ROLLOUT: f"{other.rollout}/{other.attempt}"}),
                (stack.url(AttemptKey(own.rollout, 1)), {}),
                (stack.url(AttemptKey("nobody", 0)), {}),
            ):
                refused = await http.post(f"{url}/{path}", json=body, headers={**scheme, **headers})
                assert refused.status_code == 401, (url, headers)
                assert "API key" in refused.text
            for url, headers in (
                (stack.url(own), {}),
                (stack.url(), {HEADER_ROLLOUT: f"{own.rollout}/{own.attempt}"}),
                (stack.url(), {}),
            ):
                taken = await http.post(f"{url}/{path}", json=body, headers={**scheme, **headers})
                assert taken.status_code == 200, taken.text
    mixed = {"Authorization": f"Bearer {key}", HEADER_ROLLOUT: f"{other.rollout}/{other.attempt}"}
    assert (await http.post(f"{stack.url(own)}/chat/completions", json=GOOD, headers=mixed)).status_code == 400
    assert await stack.calls(other) == []
    assert len(await stack.calls(own)) == 24


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.invalid"])
async def test_it_does_not_listen_elsewhere_without_a_key_of_your_choice(host: str) -> None:
    with pytest.raises(ServerError, match=rf"{host}.*AGL_WORKER_KEY"):
        async with running_stack(host=host):
            pass


async def test_with_a_key_of_your_choice_it_listens_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, http: httpx.AsyncClient
) -> None:
    monkeypatch.setenv("AGL_WORKER_KEY", "chosen")
    async with running_stack(host="0.0.0.0", keys=Keys.of_run(tmp_path / "server.json")) as stack:
        assert stack.server.base_url.startswith("http://127.0.0.1:")
        url = f"{stack.server.base_url}/agl/v1/health"
        assert (await http.get(url, headers={"Authorization": "Bearer chosen"})).status_code == 200
        assert (await http.get(url, headers={"Authorization": "Bearer chosem"})).status_code == 401


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
async def test_it_listens_on_any_loopback_address(host: str) -> None:
    async with running_stack(host=host) as stack:
        await stack.client(await stack.lease()).chat.completions.create(**GOOD)


async def test_an_address_of_another_machine_says_so() -> None:
    with pytest.raises(ServerError, match="an address of this machine"):
        async with running_stack(host="192.0.2.7", keys=Keys(chosen=frozenset({"AGL_WORKER_KEY"}))):
            pass


def test_keys_survive_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGL_WORKER_KEY", "AGL_OPERATOR_KEY"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "server.json"
    first = Keys.of_run(file)
    first.write(file, "http://127.0.0.1:1")
    again = Keys.of_run(file)
    assert again == first
    assert not again.chosen
    again.write(file, "http://127.0.0.1:2")
    content = json.loads(file.read_text())
    assert content == {
        "base_url": "http://127.0.0.1:2",
        "worker_key": first.worker,
        "operator_key": first.operator,
        "agent_secret": first.secret,
        "begun": False,
        "over": False,
    }
    assert len({first.worker, first.operator, first.secret}) == 3
    assert Keys.of_run(tmp_path / "another.json").worker != first.worker
    file.write_text("{")
    assert Keys.of_run(file).secret != first.secret


def test_only_its_owner_can_read_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    file.write_text("{}")
    file.chmod(0o666)
    before = os.umask(0)
    try:
        Keys().write(file, "http://127.0.0.1:1")
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["server.json"]


def test_a_key_of_your_choice_comes_first_and_is_not_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "server.json"
    generated = Keys()
    generated.write(file, "http://127.0.0.1:1")
    monkeypatch.setenv("AGL_WORKER_KEY", "  chosen-by-me\n")
    chosen = Keys.of_run(file)
    assert (chosen.worker, chosen.operator, chosen.secret) == ("chosen-by-me", generated.operator, generated.secret)
    assert chosen.chosen == {"AGL_WORKER_KEY"}
    chosen.write(file, "http://127.0.0.1:1")
    assert "chosen-by-me" not in file.read_text()
    monkeypatch.setenv("AGL_WORKER_KEY", "chosen-by-me")
    monkeypatch.setenv("AGL_OPERATOR_KEY", "chosen-too")
    Keys.of_run(file).write(file, "http://127.0.0.1:1")
    assert "chosen" not in file.read_text()
    for name in ("AGL_WORKER_KEY", "AGL_OPERATOR_KEY"):
        monkeypatch.setenv(name, "chosen-by-me")
    with pytest.raises(ServerError, match="are the same"):
        Keys.of_run(file)
    monkeypatch.setenv("AGL_WORKER_KEY", "schlüssel")
    with pytest.raises(ServerError, match="ASCII"):
        Keys.of_run(file)
    monkeypatch.setenv("AGL_WORKER_KEY", " ")
    assert not Keys.of_run(file).chosen


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
            await client.close_attempt(lease, CloseRequest(ending=Ending.FINISHED))
        secrets = [keys.worker, keys.operator, keys.secret, lease.key, lease.secret]
        stored = await asyncio.to_thread(lambda: b"".join(file.read_bytes() for file in tmp_path.iterdir()))
    assert b"hello" in stored
    assert [secret for secret in secrets if secret.encode() in stored] == []
    assert [secret for secret in secrets if secret in caplog.text or secret in repr(keys)] == []
    assert [
        secret for secret in secrets if any(secret in json.dumps(dict(r.body)) for r in stack.upstream.received)
    ] == []
    assert [secret for secret in secrets if any(secret in str(r.headers) for r in stack.upstream.received)] == []
