"""Runs and a browser that has shown the token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from agl_view.serving import make_app

from .viewed_runs import HERE, TOKEN, Folder


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Folder]:
    (tmp_path / "runs").mkdir()
    with TestClient(make_app([tmp_path / "runs"], TOKEN), "http://127.0.0.1:8000", client=HERE) as browser:
        assert browser.get(f"/?token={TOKEN}").status_code == 200
        yield Folder(tmp_path / "runs", browser)
