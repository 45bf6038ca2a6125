"""The bench of the tests of settings; helpers beside this file and the server's are importable from the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .settings_bench import Bench
from .tiny_policy import make_checkpoint


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("policies") / "tiny")


@pytest.fixture(scope="session")
def benches(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> tuple[Bench, Bench]:
    """Two, so that what is seen on one can be seen again on the other."""
    return Bench(tmp_path_factory.mktemp("bench"), weights), Bench(tmp_path_factory.mktemp("again"), weights)


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    """Settings of the engine's process reach all of torch; here that process is the tests'."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
