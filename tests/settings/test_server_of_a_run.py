"""Where a run's server listens, and where its keys are kept."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from settings_bench import Bench

from agl_core.errors import ConfigError, ServerError
from agl_core.training.progress import Silent
from agl_core.training.run import new_run_dir
from agl_core.training.session import open_session
from agl_core.wire import SERVER_FILE, WORKER_KEY


@pytest.fixture
def run_dir(benches: tuple[Bench, Bench], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(WORKER_KEY, raising=False)
    return new_run_dir(benches[0].load())


def files(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_file()]


async def keys_of_a_session(bench: Bench, run_dir: Path) -> tuple[str, str]:
    loaded = bench.load({"workers.embedded": False})
    async with (
        loaded.store.build(run_dir) as store,
        open_session(loaded, run_dir, 0, store, Silent(), None) as session,
    ):
        return session.server.worker_key, session.server.agent_key


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
    async with loaded.store.build(run_dir) as store:
        with pytest.raises(ServerError, match=r"0\.0\.0\.0.*AGL_WORKER_KEY"):
            async with open_session(loaded, run_dir, 0, store, Silent(), None):
                pass
    assert not (run_dir / SERVER_FILE).exists()
    assert not (run_dir / "seen.json").exists(), "the engine was started"


async def test_with_a_key_it_does(benches: tuple[Bench, Bench], run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER_KEY, "chosen-by-me")
    loaded = benches[0].load({"server.host": "0.0.0.0", "workers.embedded": False})
    async with (
        loaded.store.build(run_dir) as store,
        open_session(loaded, run_dir, 0, store, Silent(), None) as session,
    ):
        assert session.server.worker_key == "chosen-by-me"
        told = json.loads((run_dir / SERVER_FILE).read_text())
    assert told["worker_key"] is None
    assert told["base_url"] == session.server.base_url
    assert "chosen-by-me" not in json.dumps(told)


def test_a_lease_outlives_a_heartbeat(benches: tuple[Bench, Bench]) -> None:
    benches[0].load({"server.heartbeat": 10.0})
    for given in ({"server.heartbeat": 10.5}, {"server.lease": 9.0}):
        with pytest.raises(ConfigError, match="at least twice heartbeat"):
            benches[0].load(given)
