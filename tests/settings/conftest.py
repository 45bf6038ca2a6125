"""The bench of the tests of settings; helpers beside this file and the server's are importable from the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from .settings_bench import Bench


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that passes for a policy: the scripted engine reads none of it."""
    folder = tmp_path_factory.mktemp("policies") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), weights)
