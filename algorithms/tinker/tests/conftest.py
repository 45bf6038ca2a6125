"""One server for all tests of a run: it starts in ten seconds, and compiles each shape of rows once."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .skyrl_tx import KEY, SkyrlTx, skyrl_tx


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyrlTx]:
    os.environ["TINKER_API_KEY"] = KEY
    with skyrl_tx(tmp_path_factory.mktemp("server")) as running:
        yield running
