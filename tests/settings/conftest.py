"""The bench of the tests of settings; helpers beside this file and the server's are importable from the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from .settings_bench import Bench
from .tiny_policy import make_checkpoint


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("policies") / "tiny")


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), weights)
