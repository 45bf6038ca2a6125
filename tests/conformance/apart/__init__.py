"""The drivers of frameworks whose pins do not go together: each plays in an environment of its own.

`make test-frameworks` makes these environments. `declared` imports no framework: there a driver says what it plays, for
the page. The modules beside it build the agents, and name their driver `DRIVER`, as the Makefile knows it.
"""

from __future__ import annotations

import os

from ...support.testing_aids import NO_TELEMETRY
from ..driver import Driver
from .declared import CrewAI, DSPy, GoogleADK, Haystack, LlamaIndex, PydanticAI, Smolagents, Strands

__all__ = ["APART"]

APART: tuple[Driver, ...] = (
    LlamaIndex(),
    Haystack(),
    CrewAI(),
    Smolagents(),
    DSPy(),
    PydanticAI(),
    Strands(),
    GoogleADK(),
)

# Before the module beside a driver imports its framework.
os.environ.update(NO_TELEMETRY)
