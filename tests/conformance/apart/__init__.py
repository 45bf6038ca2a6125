"""The drivers of frameworks whose pins do not go together: each plays in an environment of its own.

`make test-frameworks` makes these environments. This package imports no framework: here, a driver declares what it
plays, for the page; the module beside it builds the agents.
"""

from __future__ import annotations

import os

from agl_core.testing.adapters.driver import Driver

from ...support.testing_aids import NO_TELEMETRY
from .crewai import CrewAI
from .dspy import DSPy
from .google_adk import GoogleADK
from .haystack import Haystack
from .llama_index import LlamaIndex
from .pydantic_ai import PydanticAI
from .smolagents import Smolagents
from .strands import Strands

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
