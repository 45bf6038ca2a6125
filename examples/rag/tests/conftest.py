"""The researcher, with a scripted model behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def answer(model: Any) -> Iterator[Any]:
    """The agent's entry, imported when its environment is ready; the SDK's traces stay here."""
    from agents import set_tracing_disabled
    from researcher import answer

    set_tracing_disabled(True)
    yield answer
    set_tracing_disabled(False)
