"""Fixtures for tests of plugins; import those that you want into your `conftest.py`.

from agl_core.testing.fixtures import no_problems  # noqa: F401
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agl_core.capture import reports


@pytest.fixture(autouse=True)
def no_problems(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Adapters swallow their failures; here they fail the test, unless it is marked with `expects_problems`."""
    yield
    if "expects_problems" not in request.keywords:
        assert [each.getMessage() for each in caplog.get_records("call") if each.name == reports.__name__] == []
