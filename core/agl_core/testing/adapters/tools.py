"""What the agents of the scenarios can do, and a tool that ends in every way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from agl_core.testing.scripts import CallTools
from agl_core.types import Episode, ToolResult
from agl_core.wire.workers import ToolResultReport


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def look_up(topic: str) -> str:
    """Look a topic up."""
    return f"{topic} is a town."


def broken() -> str:
    """Fail."""
    raise ValueError("boom")


def slow() -> str:
    """Take too long."""
    raise TimeoutError("no answer in 5 seconds, timed out")


def nothing() -> str:
    """Find nothing."""
    return ""


TOOLS: dict[str, Callable[..., Any]] = {tool.__name__: tool for tool in (add, multiply, look_up, broken, slow, nothing)}

_ACTION = re.compile(r"Action: (\w+)\[(.*)\]")


def action(text: str) -> tuple[str, str] | None:
    """The tool and its one argument that a ReAct text asks for; None if it is an answer.

    >>> action("Thought: a town. Action: look_up[Bern]")
    ('look_up', 'Bern')
    """
    found = _ACTION.search(text)
    return (found[1], found[2]) if found else None


def weather(city: str) -> str:
    """Weather of a city."""
    if city == "Atlantis":
        raise ValueError("no such city")
    if city == "Far":
        raise TimeoutError("no answer")
    return "" if city == "Nowhere" else "22 °C"


WEATHER_STATUSES = {"Bern": "ok", "Atlantis": "error", "Far": "timeout", "Nowhere": "empty"}
"""How `weather` ends, by city."""
ASK_WEATHER = CallTools([("weather", {"city": city}, f"c-{city}") for city in WEATHER_STATUSES])
"""A reply that asks for all of these at once."""


def weather_statuses(results: Iterable[ToolResult | ToolResultReport]) -> dict[str, str]:
    """How the calls of `weather` ended, by city."""
    asked: list[tuple[Any, str]] = [(each.arguments, str(each.status)) for each in results]
    return {arguments["city"]: status for arguments, status in asked}


def tools_by_call(episode: Episode) -> list[tuple[Any, ...]]:
    """Of each call, the agent, and each tool that it asked for with its status."""
    return [
        (each.agent, *((result.tool, str(result.status)) for result in each.tool_results))
        for each in episode.transitions
    ]
