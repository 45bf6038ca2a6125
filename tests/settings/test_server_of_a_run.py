"""Where a run's server listens, and where its keys are kept."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path

import pytest
from settings_bench import Bench

from agl_core.errors import ConfigError, ServerError
from agl_core.training.progress import Silent
from agl_core.training.run import new_run_dir, train
from agl_core.training.serving import near_server, server_apart
from agl_core.training.session import open_session
from agl_core.wire import OPERATOR_KEY, SERVER_FILE, WORKER_KEY


@pytest.fixture
def run_dir(benches: tuple[Bench, Bench], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(WORKER_KEY, raising=False)
    monkeypatch.delenv(OPERATOR_KEY, raising=False)
    return new_run_dir(benches[0].load())


def files(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_file()]


async def keys_of_a_session(bench: Bench, run_dir: Path) -> tuple[str, str]:
    loaded = bench.load({"workers.embedded": False})
    async with (
        near_server(loaded, run_dir) as server,
        open_session(loaded, run_dir, server, Silent()),
    ):
        return server.worker_key, server.agent_key


async def test_workers_of_the_same_user_find_it(benches: tuple[Bench, Bench], run_dir: Path) -> None:
    first = await keys_of_a_session(benches[0], run_dir)
    file = run_dir / SERVER_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text())["worker_key"] == first[0]
    assert await keys_of_a_session(benches[0], run_dir) == first, "whoever holds a key can go on when a run is resumed"
    others = {each.name: each.read_bytes() for each in files(run_dir) if each != file}
    assert {"config.toml", "store.sqlite"} <= others.keys()
    assert [name for name, content in others.items() if any(key.encode() in content for key in first)] == []


async def test_it_does_not_listen_elsewhere_without_a_key_and_says_so_before_anything_starts(
    benches: tuple[Bench, Bench], run_dir: Path
) -> None:
    loaded = benches[0].load({"server.host": "0.0.0.0"})
    with pytest.raises(ServerError, match=r"0\.0\.0\.0.*AGL_WORKER_KEY"):
        await train(loaded, run_dir, Silent())
    assert not (run_dir / SERVER_FILE).exists()
    assert not (run_dir / "seen.json").exists(), "the engine was started"


async def test_with_a_key_it_does(benches: tuple[Bench, Bench], run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER_KEY, "chosen-by-me")
    loaded = benches[0].load({"server.host": "0.0.0.0", "workers.embedded": False})
    async with (
        near_server(loaded, run_dir) as server,
        open_session(loaded, run_dir, server, Silent()),
    ):
        assert server.worker_key == "chosen-by-me"
        told = json.loads((run_dir / SERVER_FILE).read_text())
    assert told["worker_key"] is None
    assert told["base_url"] == server.base_url
    assert "chosen-by-me" not in json.dumps(told)


def test_a_lease_outlives_a_heartbeat(benches: tuple[Bench, Bench]) -> None:
    benches[0].load({"server.heartbeat": 10.0})
    for given in ({"server.heartbeat": 10.5}, {"server.lease": 9.0}):
        with pytest.raises(ConfigError, match="at least twice heartbeat"):
            benches[0].load(given)


async def test_a_server_apart_listens_where_the_one_before_did(benches: tuple[Bench, Bench], run_dir: Path) -> None:
    loaded = benches[0].load()
    async with server_apart(loaded, run_dir) as first:
        keys, url = first.keys, first.base_url
    async with server_apart(loaded, run_dir) as second:
        assert (second.keys, second.base_url, second.run.name) == (keys, url, run_dir.name)
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
        async with server_apart(loaded, run_dir) as third:
            assert third.base_url != url, "another program has the port"
            assert json.loads((run_dir / SERVER_FILE).read_text())["base_url"] == third.base_url


async def test_a_server_apart_needs_both_keys_to_listen_elsewhere(
    benches: tuple[Bench, Bench], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WORKER_KEY, "chosen-by-me")
    loaded = benches[0].load({"server.host": "0.0.0.0"})
    with pytest.raises(ServerError, match="AGL_OPERATOR_KEY"):
        async with server_apart(loaded, run_dir):
            pass
