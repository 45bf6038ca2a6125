"""A server elsewhere, as a trainer uses it: it may go away at any time, and what was said to it stays said."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl_core.cli.train import reached
from agl_core.client import RefusedError, RemoteServer
from agl_core.errors import ConfigError, EngineError, StoreError
from agl_core.protocols import Upstream
from agl_core.server import Keys, LightningServer
from agl_core.store.sqlite import SqliteStore
from agl_core.testing import episodes as make
from agl_core.testing.server import running_stack, until
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.training.server import check_reachable
from agl_core.types import AttemptKey, Ending, Reward
from agl_core.wire.keys import OPERATOR_KEY
from agl_core.wire.trainers import BeginRequest, FinishRequest, Registration, RunSettings, VersionsRequest
from agl_core.wire.workers import CloseRequest, LeaseRequest

from .road import Road

KEYS = Keys()


def beginning(started: float = 1.0) -> BeginRequest:
    return BeginRequest(run="run", started=started, config=None, resumed_step=None)


def registration(url: str) -> Registration:
    return Registration(
        restart=0,
        urls=(url,),
        models={"default": "served"},
        api_key="k",
        versions={"default": 0},
        settings=RunSettings(sampling=None, seed=0, timeout=30, attempts=1),
        expires=None,
    )


class Place:
    """A server that can be killed and started again on the same store, and the way to it."""

    def __init__(self, folder: Path, upstream: str) -> None:
        self._folder, self._upstream = folder, upstream
        self._stack = contextlib.AsyncExitStack()
        self._road: Road | None = None
        self.server: LightningServer

    async def start(self) -> None:
        store = await self._stack.enter_async_context(SqliteStore(self._folder / "store.sqlite"))
        options: dict[str, Any] = {"upstream": None, "keys": KEYS, "run": "run"}
        self.server = (await self._stack.enter_async_context(running_stack(store=store, **options))).server
        road = Road(self.server.base_url)
        road.port = self._road.port if self._road else 0
        await road.open()
        self._road = road

    async def end(self) -> None:
        assert self._road is not None
        self._road.close()
        await self.server.stop(over=False)
        await self._stack.aclose()

    @property
    def url(self) -> str:
        assert self._road is not None
        return self._road.url


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with ScriptedUpstream() as upstream:
        place = Place(tmp_path, upstream.url)
        await place.start()
        yield place
        await place.end()


async def test_everything_waits_for_a_server_that_is_away_and_goes_on(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async with RemoteServer(place.url, KEYS.operator, lease=1.0) as remote:
        await remote.run.begin(beginning())
        await remote.run.serve(registration("http://127.0.0.1:9/v1"))
        await remote.run.queue.enqueue([make.rollout("a"), make.rollout("b")])
        await place.server.queue.lease(LeaseRequest(worker="w", capacity=1))
        waiting = asyncio.ensure_future(remote.run.queue.done(["a", "b"]))
        with caplog.at_level(logging.WARNING, "agl_core.client"):
            await place.end()
            await until(lambda: "cannot be reached" in caplog.text)
            asked = [
                remote.run.queue.enqueue([make.rollout("b"), make.rollout("c")]),
                remote.run.store.put(Reward("a", 0, "n", 0.5, "s")),
                remote.run.publish(VersionsRequest(restart=0, versions={"default": 4})),
                remote.run.store.rollouts(run="run"),
            ]
            meanwhile = [asyncio.ensure_future(each) for each in asked]
            await place.start()
            *_, rollouts = await asyncio.gather(*meanwhile)
            assert {each.id for each in rollouts} in ({"a", "b"}, {"a", "b", "c"})
            await until(lambda: place.server.versions == {"default": 4})
            leases = await place.server.queue.lease(LeaseRequest(worker="w", capacity=9, wait=20))
            assert [each.rollout for each in leases.leases] == ["b", "c"], "its engine was told of again"
            await until(lambda: "is back" in caplog.text)
        assert not waiting.done()
        await place.server.queue.close_attempt(AttemptKey("c", 0), CloseRequest(ending=Ending.CANCELLED))
        await place.server.queue.close_attempt(AttemptKey("b", 0), CloseRequest(ending=Ending.CANCELLED))
        assert [each.id for each in await waiting] == ["b"]
        assert [each.value for each in await remote.run.store.rewards([AttemptKey("a", 0)])] == [0.5]
        said = [record.message for record in caplog.records if record.name == "agl_core.client.link"]
        assert len(said) == 2, said
        remote.run.check()


async def test_who_was_replaced_is_told(place: Place) -> None:
    async with (
        RemoteServer(place.url, KEYS.operator, lease=0.4) as first,
        RemoteServer(place.url, KEYS.operator) as second,
    ):
        await first.run.begin(beginning())
        await first.run.serve(registration("http://127.0.0.1:9/v1"))
        first.run.check()
        assert (await second.run.begin(beginning(2.0))).restart == 1

        def told() -> bool:
            try:
                first.run.check()
            except RefusedError as error:
                return "another trainer has taken the run over" in str(error)
            return False

        await until(told)
        with pytest.raises(RefusedError, match="taken the run over"):
            await first.run.queue.enqueue([make.rollout("a")])
        await first.run.finish(FinishRequest(restart=0, over=True))  # nobody minds
        assert not (await place.server.queue.lease(LeaseRequest(worker="w", capacity=1))).closed


@pytest.mark.parametrize("large", [8 << 20, 200], ids=["in one request", "in parts"])
async def test_who_was_replaced_writes_nothing(place: Place, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_core.client.chunks.LARGE", large)
    async with (
        RemoteServer(place.url, KEYS.operator) as first,
        RemoteServer(place.url, KEYS.operator) as second,
    ):
        await first.run.begin(beginning())
        await first.run.store.put(*(Reward("a", 0, f"n{number}", 0.5, "s") for number in range(9)))
        await second.run.begin(beginning(2.0))
        await second.run.queue.enqueue([make.rollout("b", restart=1)])

        with pytest.raises(StoreError, match="another trainer has taken the run over"):
            await first.run.store.put(*(Reward("a", 0, f"n{number}", 0.25, "s") for number in range(9)))
        await first.run.queue.cancel(["b"])

        await second.run.store.put(Reward("a", 0, "n0", 0.75, "s"))
        found = await second.run.store.rewards([AttemptKey("a", 0)])
        assert [each.value for each in found] == [0.75, *[0.5] * 8]
        assert place.server.queue.queued == 1


async def test_ending_is_not_held_up_for_long_by_a_server_that_is_away(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_core.client.link._FIRST_DELAY", 0.01)
    async with RemoteServer(place.url, KEYS.operator) as remote:
        await remote.run.begin(beginning())
        await place.end()
        await asyncio.wait_for(remote.run.queue.cancel(["a"]), 20)
        await asyncio.wait_for(remote.run.finish(FinishRequest(restart=0, over=False)), 20)
        await place.start()


async def test_a_wrong_key_ends_at_once(place: Place) -> None:
    async with RemoteServer(place.url, KEYS.worker) as remote:
        with pytest.raises(RefusedError, match=r"401.*operator key"):
            await remote.run.begin(beginning())
        with pytest.raises(StoreError, match="401"):
            await remote.run.store.runs()


async def test_the_key_of_another_runs_server_is_told_to_be_that(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OPERATOR_KEY, raising=False)
    loaded: Any = SimpleNamespace(config=SimpleNamespace(name="other", runs=tmp_path))
    other = tmp_path / "other"
    other.mkdir()
    Keys().write(other / "server.json", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"(?s)refuses the operator key .*in a server.json.* Set AGL_OPERATOR_KEY"):
        await asyncio.to_thread(reached, loaded, other, place.url)
    monkeypatch.setenv(OPERATOR_KEY, KEYS.operator)
    assert (await asyncio.to_thread(reached, loaded, other, place.url)).key == KEYS.operator


def test_an_engine_that_the_server_cannot_reach_is_told_how_to_listen() -> None:
    near, remote = Upstream(("http://127.0.0.1:5/v1",), {}, "k"), Upstream(("http://192.0.2.9:5/v1",), {}, "k")
    for server in ("http://192.0.2.7:80", "http://no.such.host.invalid:80"):
        with pytest.raises(EngineError, match=r"127\.0\.0\.1:5.*another machine.*host = "):
            check_reachable(near, server)
        check_reachable(remote, server)
    for here in ("http://127.0.0.1:80", "http://localhost:80", "http://[::1]:80", "http://127.0.0.7:80"):
        check_reachable(near, here)
