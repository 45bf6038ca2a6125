"""Makers of records for the learning tests."""

from __future__ import annotations

from types import ModuleType

import pytest

from agl_core.testing import episodes


@pytest.fixture(scope="session")
def make() -> ModuleType:
    return episodes
