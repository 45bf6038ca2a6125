"""What the agents of the scenarios can do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


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
