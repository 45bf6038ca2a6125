"""Responses with tool calls as models write them, in each format; vLLM's own parsers read them in `live_parsers.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FIXTURE = Path(__file__).with_name("parsers.jsonl")
"""A line for each case: format, case, and what vLLM's parser gave: content, and calls as name and arguments.

For a parser of reasoning: its name, the text, content and reasoning.
"""

Call = tuple[str, dict[str, Any]]

TYPES = {"s": "string", "i": "integer", "x": "number", "b": "boolean", "l": "array", "o": "object"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "One of two.",
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}},
        },
    }
    for name in ("look_up", "add")
]


def _json(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_json(*call)}\n</tool_call>" for call in calls)


def qwen3_coder(calls: Sequence[Call]) -> str:
    def write(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"

    return "\n".join(write(*call) for call in calls)


def glm45(calls: Sequence[Call]) -> str:
    def write(name: str, arguments: dict[str, Any]) -> str:
        pairs = arguments.items()
        values = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_text(v)}</arg_value>\n" for k, v in pairs)
        return f"<tool_call>{name}\n{values}</tool_call>"

    return "\n".join(write(*call) for call in calls)


def deepseek_v3(calls: Sequence[Call]) -> str:
    return _deepseek([f"function<｜tool▁sep｜>{name}\n```json\n{_text(args)}\n```" for name, args in calls])


def deepseek_v31(calls: Sequence[Call]) -> str:
    return _deepseek([f"{name}<｜tool▁sep｜>{_text(args)}" for name, args in calls])


def _deepseek(bodies: Sequence[str]) -> str:
    calls = "".join(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies)
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


def mistral(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS] [{', '.join(_json(*call) for call in calls)}]"


def mistral_named(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_text(args)}" for name, args in calls)


def llama3_json(calls: Sequence[Call]) -> str:
    return "; ".join(json.dumps({"name": n, "parameters": a}, ensure_ascii=False) for n, a in calls)


WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    writer.__name__: writer
    for writer in (hermes, qwen3_coder, glm45, deepseek_v3, deepseek_v31, mistral, mistral_named, llama3_json)
}
REASONING_PARSERS = ("deepseek_r1", "qwen3", "glm45")
THOUGHTS = (
    "<think>\nFirst 12,\n\nthen 30.\n</think>\n\nIt is 42.",
    "the prompt began it</think>It is 42.",
    "<think></think>42",
    "<think>cut",
    "世界 </thin",
)
ADD: Call = ("add", {"i": 12, "x": 0.5})
LOOK_UP: Call = ("look_up", {"s": "a < b"})
NESTED: Call = ("add", {"o": {"a": [1, {"b": None}]}, "l": [True, "x", 2.5], "b": False})
LINES: Call = ("look_up", {"s": 'one\n  two "three"\n\n{four}'})

PROSE_AFTER, UNKNOWN = "before prose", "a tool that there is not"
MALFORMED = ("cut in a call", "cut in the second call", "garbage in a call", "an argument that is no JSON")


def texts(name: str) -> dict[str, str]:
    """The responses of one format, by what is in them."""
    write = WRITERS[name]
    one, two = write([ADD]), write([ADD, LOOK_UP])
    half = len(one) // 2
    garbled, no_json = one[:half] + one[half + 12 :], one.replace("12", "?")
    malformed = (one[: len(one) * 2 // 3], two[: len(two) * 4 // 5], garbled, no_json)
    return {
        "prose": "If 2 < 3, so is 1 > 0.",
        "one call": one,
        "no arguments": write([("add", {})]),
        "after prose": f"Let me see.\n\n{one}",
        PROSE_AFTER: f"{one}\nThat is it.",
        "parallel": two,
        "the same twice": write([ADD, ADD]),
        "nested": write([NESTED]),
        "unicode": write([("look_up", {"s": "Grüße, 世界 🌍"})]),
        "lines": write([LINES]),
        "numbers as text": write([("look_up", {"s": "12", "i": 12})]),
        UNKNOWN: write([("divide", {"s": "1"})]),
        "cut in the first mark": one[:5],
        **dict(zip(MALFORMED, malformed, strict=True)),
    }
