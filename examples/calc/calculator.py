"""The agent's one tool, and what the agent is told about it."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from langchain_core.tools import tool

SYSTEM_PROMPT = "Solve the problem. Use the calculator."

_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_LONGEST_EXPRESSION = 100


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    value = evaluate(expression)
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def evaluate(expression: str) -> float:
    """The value of an arithmetic expression with + - * / % and parentheses; nothing else is evaluated.

    Raises ValueError for everything else.

    >>> evaluate("2 * (3 + 4)")
    14
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError(f"an expression may have {_LONGEST_EXPRESSION} characters, this one has {len(expression)}")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ValueError(f"cannot evaluate {expression!r}") from error
    if not math.isfinite(value):
        raise ValueError(f"{expression!r} is no finite number")
    return value


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
    raise ValueError("only numbers, + - * / % and parentheses can be evaluated")
