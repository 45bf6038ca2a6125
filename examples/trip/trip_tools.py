"""The assistant's instruction, its limit, and three tools, each of which can fail.

>>> rome = Trip("Rome", "Nova", refund=30, fare=80)
>>> use(rome, "memory", '{"key": "airline"}'), use(rome, "search", '{"query": "airline Nova to Rome"}')
('airline Nova', 'fare 80')
>>> use(rome, "search", '{"query": "to Rome"}')
'TimeoutError: name an airline'
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from trips import AIRLINES, Trip

SYSTEM_PROMPT = "Help the traveller."
MOST_CALLS = 5
"""Replies of the model before the assistant gives up: what the shortest way to the answer takes, and not one more."""
NOTHING = "[]"

_SUM = re.compile(r"(?:[a-z]+ )?(\d{1,6}) ?([-+]) ?(?:[a-z]+ )?(\d{1,6})", re.ASCII)


def memory(trip: Trip, key: str) -> str:
    """The note about the traveller under a key; of most keys there is none."""
    return {"airline": f"airline {trip.airline}", "refund": f"refund {trip.refund}"}.get(key, NOTHING)


def search(trip: Trip, query: str) -> str:
    """The fare of an airline's next flight to a city. All airlines at once are too many to wait for."""
    words = set(query.split())
    airlines = words & set(AIRLINES)
    if not airlines:
        raise TimeoutError("name an airline")
    return f"fare {trip.fare}" if airlines == {trip.airline} and trip.city in words else NOTHING


def calculator(trip: Trip, expression: str) -> str:
    """The sum or the difference of two numbers, each with a word before it if that helps."""
    found = _SUM.fullmatch(expression)
    if found is None:
        raise ValueError("no numbers")
    a, operator, b = found.groups()
    return f"= {int(a) + int(b) if operator == '+' else int(a) - int(b)}"


_TOOLS: dict[str, tuple[str, Callable[[Trip, str], str]]] = {
    "memory": ("key", memory),
    "search": ("query", search),
    "calculator": ("expression", calculator),
}
"""Each tool and its one parameter, by name."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": tool.__doc__,
            "parameters": {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]},
        },
    }
    for name, (parameter, tool) in _TOOLS.items()
]
"""The tools as the model is told of them."""


def use(trip: Trip, name: str, arguments: str) -> str:
    """The output of a tool; a failure is something to tell the model, not the end of the assistant."""
    if name not in _TOOLS:
        return f"Error: there is no tool {name}"
    parameter, tool = _TOOLS[name]
    try:
        return tool(trip, _argument(arguments, parameter))
    except TimeoutError as error:
        return f"TimeoutError: {error}"
    except ValueError as error:
        return f"Error: {error}"


def _argument(arguments: str, parameter: str) -> str:
    given = json.loads(arguments)
    if not isinstance(given, dict) or not isinstance(given.get(parameter), str):
        raise ValueError(f"{parameter} is missing")
    return str(given[parameter])
