"""The agent's one tool, and what the agent is asked to do with it."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

SYSTEM_PROMPT = "Solve it in steps with the calculator."
MOST_DIGITS = 30

_NUMBER = r"(-?\d+(?:\.\d+)?)"
_OPERATION = re.compile(rf"\s*{_NUMBER}\s*([-+*/])\s*{_NUMBER}\s*", re.ASCII)
_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


def calculator(expression: str) -> str:
    """Do one operation with two numbers, for instance 12*7."""
    read = _OPERATION.fullmatch(expression)
    if read is None or len(expression) > MOST_DIGITS:
        raise ValueError("Error: write one operation with two numbers")
    first, sign, second = read.groups()
    try:
        value = _OPERATORS[sign](_number(first), _number(second))
    except ZeroDivisionError:
        raise ValueError("Error: division by zero") from None
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def _number(text: str) -> float:
    return float(text) if "." in text else int(text)
