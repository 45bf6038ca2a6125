"""The drivers of the matrix."""

from __future__ import annotations

from agl_conformance.driver import Driver
from agl_conformance.drivers.autogen_teams import AutoGen
from agl_conformance.drivers.by_hand import ByHand, ByHeaders
from agl_conformance.drivers.langgraph_agents import LangChain
from agl_conformance.drivers.opentelemetry_spans import OpenTelemetry
from agl_conformance.drivers.sdk_agents import OpenAIAgents

__all__ = ["DRIVERS"]

DRIVERS: tuple[Driver, ...] = (
    LangChain(),
    AutoGen(),
    OpenAIAgents(),
    OpenTelemetry(),
    ByHand(),
    ByHeaders(),
)
