"""Faults planted in recorded data, and the whole way from the store to an update of real weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .learning_line import Line
from .recorded_data import Data
from .tiny_policy import make_checkpoint


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cost more than they give to tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    """One tiny policy per algorithm, trained on everything that the tests make of their data."""
    return Line(make_checkpoint(tmp_path_factory.mktemp("policies") / "tiny"))


@pytest.fixture
def data() -> Data:
    return Data.sound("r")
