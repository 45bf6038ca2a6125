"""The agent's one tool.

>>> use('{"expression": "4 + 3 - 9"}')
'-2'
>>> use('{"expression": "4 plus 3"}')
'error: the expression must be numbers with + or - between them'
"""

from __future__ import annotations

import json
import re
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Work out a sum.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]

_SUM = re.compile(r"-? ?\d{1,6}( ?[+-] ?\d{1,6}){0,9}", re.ASCII)


def use(arguments: str) -> str:
    expression = json.loads(arguments).get("expression")
    if not isinstance(expression, str):
        return "error: the calculator takes an expression"
    if not _SUM.fullmatch(expression.strip()):
        return "error: the expression must be numbers with + or - between them"
    return str(sum(int(term) for term in re.findall(r"[+-]?\d+", expression.replace(" ", ""))))
