"""The conformance suite: what a driver for another framework needs."""

from agl_core.testing.adapters.driver import (
    ATTACH,
    CHAT,
    EVERY,
    MESSAGES,
    RESPONSES,
    Agent,
    Driver,
    Gap,
    InexpressibleError,
    Program,
    Question,
    Scenario,
    Setting,
)

__all__ = [
    "ATTACH",
    "CHAT",
    "EVERY",
    "MESSAGES",
    "RESPONSES",
    "Agent",
    "Driver",
    "Gap",
    "InexpressibleError",
    "Program",
    "Question",
    "Scenario",
    "Setting",
]
