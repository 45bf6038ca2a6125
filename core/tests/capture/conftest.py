"""agl attached to this process without an adapter; modules whose tests all need it mark themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import agl_core


@pytest.fixture
def attached() -> Iterator[None]:
    attachment = agl_core.attach([])
    yield
    attachment.detach()
