"""The calc agent, with a scripted model behind it."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def solve(model: Any) -> Any:
    """The agent's entry, imported when its environment is ready."""
    from agent import solve

    return solve
