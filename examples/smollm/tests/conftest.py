"""The agents, with a scripted model behind them."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def solve(model: Any) -> Any:
    """The entry of the agent of one call, imported when its environment is ready."""
    from adder import solve

    return solve


@pytest.fixture
def solve_with_tool(model: Any) -> Any:
    """The entry of the agent with a calculator."""
    from tool_agent import solve

    return solve
