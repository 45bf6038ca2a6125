"""The drivers of the matrix."""

from __future__ import annotations

from ..driver import Driver
from .autogen_teams import AutoGen
from .by_hand import ByHand, ByHeaders
from .langgraph_agents import LangChain
from .opentelemetry_spans import OpenTelemetry
from .sdk_agents import OpenAIAgents

__all__ = ["DRIVERS", "ByHand", "ByHeaders"]

DRIVERS: tuple[Driver, ...] = (
    LangChain(),
    AutoGen(),
    OpenAIAgents(),
    OpenTelemetry(),
    ByHand(),
    ByHeaders(),
)
