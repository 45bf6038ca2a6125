"""The text-to-SQL agent, with a scripted model behind it."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def answer(model: Any) -> Any:
    """The agent's entry, imported when its environment is ready."""
    from text_to_sql import answer

    return answer
