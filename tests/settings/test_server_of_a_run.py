"""Where a run's server listens, and where its keys are kept."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from pathlib import Path

import httpx
import pytest

from agl_core.capture.requests import HEADER_ROLLOUT
from agl_core.errors import ServerError
from agl_core.types import Mode, Rollout, Task
from agl_core.wire import OPERATOR_KEY, SERVER_FILE, WORKER_KEY
from agl_server.training.metrics import Observer
from agl_server.training.run import local_server, new_run_dir, train
from agl_server.training.session import open_session

from .settings_bench import Bench

OF_OTHERS = {"seen.json", "weights.json", "store.sqlite.lock"}
"""The files that the engine writes, and an empty one."""


@pytest.fixture
def run_dir(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(WORKER_KEY, raising=False)
    monkeypatch.delenv(OPERATOR_KEY, raising=False)
    return new_run_dir(bench.load())


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_what_a_run_writes_is_for_its_owner_alone(bench: Bench) -> None:
    before = os.umask(0)
    try:
        loaded = bench.load({"seed": 4, "train.checkpoint_every": 1, "workers.processes": 0})
        folder = new_run_dir(loaded)
        async with local_server(loaded, folder) as server, open_session(loaded, folder, server, Observer()):
            serving = modes(folder)
            keys = [server.worker_key.encode(), server.keys.secret.encode()]
            telling = {file.name for file in files(folder) if any(key in file.read_bytes() for key in keys)}
        ran = await bench.run({"seed": 5})
        ran.summary.write()
        after = modes(ran.folder)
        mine = bench.folder / "mine"
        mine.touch()
    finally:
        os.umask(before)
    assert {"store.sqlite", "store.sqlite-wal", SERVER_FILE, "config.toml"} <= serving.keys()
    assert {"metrics.jsonl", "summary.json", "state.json"} <= after.keys()
    assert telling == {SERVER_FILE}
    written = {**serving, **after}
    assert {name: mode for name, mode in written.items() if mode != 0o600 and name not in OF_OTHERS} == {}
    assert {stat.S_IMODE(f.stat().st_mode) for f in (folder, ran.folder)} == {0o700}
    assert stat.S_IMODE(mine.stat().st_mode) == 0o666, "the umask is that of the agents too"


def modes(folder: Path) -> dict[str, int]:
    return {f.name: stat.S_IMODE(f.stat().st_mode) for f in files(folder)}


async def test_it_does_not_listen_elsewhere_without_a_key_and_says_so_before_anything_starts(
    bench: Bench, run_dir: Path
) -> None:
    loaded = bench.load({"server.host": "0.0.0.0"})
    with pytest.raises(ServerError, match=r"0\.0\.0\.0.*AGL_WORKER_KEY"):
        await train(loaded, run_dir, Observer())
    assert not (run_dir / SERVER_FILE).exists()
    assert not (run_dir / "seen.json").exists(), "the engine was started"


async def test_with_a_key_it_does(bench: Bench, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER_KEY, "chosen-by-me")
    monkeypatch.setenv(OPERATOR_KEY, "chosen-too")
    loaded = bench.load({"server.host": "0.0.0.0", "workers.processes": 0})
    async with (
        local_server(loaded, run_dir) as server,
        open_session(loaded, run_dir, server, Observer()),
    ):
        assert (server.worker_key, server.keys.operator) == ("chosen-by-me", "chosen-too")
        assert server.base_url.startswith("http://127.0.0.1:")
        async with httpx.AsyncClient(trust_env=False) as client:
            for key, status in (("chosen-by-me", 200), ("chosen-by-mf", 401)):
                sent = await client.get(f"{server.base_url}/agl/v1/health", headers={"Authorization": f"Bearer {key}"})
                assert sent.status_code == status
        assert not {WORKER_KEY, OPERATOR_KEY} & os.environ.keys(), "what agents start inherits the environment"
        server_file = json.loads((run_dir / SERVER_FILE).read_text())
    assert server_file["worker_key"] is None
    assert server_file["base_url"] == server.base_url
    assert "chosen-by-me" not in json.dumps(server_file)


async def test_what_clients_find_as_their_key_is_good_for_no_attempt(bench: Bench, run_dir: Path) -> None:
    """In the trainer's process, whose environment agents share: a request gets its attempt's key by its stamp."""
    loaded = bench.load()
    async with local_server(loaded, run_dir) as server, open_session(loaded, run_dir, server, Observer()):
        rollout = Rollout("s1-g0-m1", run_dir.name, 0, "g", Task("t", {"answer": 1, "wait": 60}), Mode.TRAIN, 1, 1)
        await server.queue.enqueue([rollout])
        while not any(attempt.answered for attempt in server.activity().attempts):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        root, key = os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), os.environ["OPENAI_API_KEY"]
        forged = {"model": "default", "messages": [{"role": "user", "content": "forged"}]}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, trust_env=False) as client:
            for path in ("", "/rollout/s1-g0-m1/attempt/0"):
                for headers in ({}, {HEADER_ROLLOUT: "s1-g0-m1/0"}):
                    sent = await client.post(f"{root}{path}/v1/chat/completions", json=forged, headers=headers)
                    assert sent.status_code == 401, (path, headers)
        await server.queue.cancel(["s1-g0-m1"])


async def test_a_server_listens_where_the_one_before_did(bench: Bench, run_dir: Path) -> None:
    loaded = bench.load()
    async with local_server(loaded, run_dir) as first:
        keys, url = first.keys, first.base_url
    async with local_server(loaded, run_dir) as second:
        assert (second.keys, second.base_url) == (keys, url)
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
        async with local_server(loaded, run_dir) as third:
            assert third.base_url != url, "another program has the port"
            assert json.loads((run_dir / SERVER_FILE).read_text())["base_url"] == third.base_url
