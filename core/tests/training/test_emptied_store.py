"""A run whose store was removed while nobody served it is not served as if it had never been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

from agl_core.config.load import SERVED, LoadedConfig, load
from agl_core.errors import StoreError
from agl_core.training.server import begin_restart, local_server


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedConfig:
    file = tmp_path / "train.toml"
    file.write_text(
        tomli_w.dumps(
            {
                "config_version": 1,
                "agent": {"entry": "my_agent:solve"},
                "tasks": {"train": {"source": "absent"}},
                "policies": {"default": {"model": {"path": "org/absent"}}},
            }
        )
    )
    return load(file, needs=SERVED)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("fault", [Path.unlink, lambda store: store.write_bytes(b"")])
async def test_an_empty_store_is_not_served_where_a_run_was_begun(
    loaded: LoadedConfig, run_dir: Path, fault: Callable[[Path], None]
) -> None:
    async with local_server(loaded, run_dir) as server:
        await begin_restart(server, loaded.config, run_dir, None)
    store = run_dir / "store.sqlite"
    saved = store.read_bytes()
    fault(store)
    for _ in range(2):
        with pytest.raises(
            StoreError, match=rf"{store} is empty, but .*server\.json says that a run was begun.*backup"
        ):
            async with local_server(loaded, run_dir):
                pass
    store.write_bytes(saved)
    async with local_server(loaded, run_dir) as server:
        assert [run.id for run in await server.store.runs()] == ["run"]


async def test_before_a_run_is_begun_there_is_nothing_to_lose(loaded: LoadedConfig, run_dir: Path) -> None:
    async with local_server(loaded, run_dir):
        pass
    (run_dir / "store.sqlite").unlink()
    async with local_server(loaded, run_dir) as server:
        await begin_restart(server, loaded.config, run_dir, None)
