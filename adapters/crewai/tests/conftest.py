"""Crews that keep what they do on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from testing_aids import NO_TELEMETRY, only_this_machine

from agl_core.testing.fixtures import no_problems  # noqa: F401

# Before a test imports CrewAI.
os.environ.update(NO_TELEMETRY)


@pytest.fixture(autouse=True)
def nothing_leaves_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A test fails if a name of another machine is looked up; what CrewAI stores is not in the user's home."""
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path))
    with only_this_machine():
        yield
