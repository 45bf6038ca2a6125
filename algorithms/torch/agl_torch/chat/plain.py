"""Tools in plain text, for models whose chat template knows none: ReAct's lines, in ordinary messages.

    system     You can use these tools:
               calculator(expression: string) - Work out a sum.
               To use one, write a line like this, and nothing after it:
               Action: calculator {"expression": …}
               The next message is its result, after "Observation:".
    user       What is 12 + 30?
    assistant  Action: calculator {"expression": "12 + 30"}
    user       Observation: 42

A model that was never trained on this rarely writes such a line by itself: show it a few first, by imitation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agl_torch.chat.messages import Message

ACTION, OBSERVATION = "Action:", "Observation:"


def in_plain_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """The conversation without tools: they are in the system message, calls and results in the text of the others."""
    written = [_written(message) for message in messages]
    if tools:
        shown = _shown(tools)
        if written and written[0]["role"] == "system":
            written[0] = {**written[0], "content": f"{written[0]['content']}\n\n{shown}"}
        else:
            written.insert(0, {"role": "system", "content": shown})
    return written


def _written(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"{OBSERVATION} {message['content']}"}
    calls = [
        f"{ACTION} {c['function']['name']} {_json(c['function']['arguments'])}" for c in message.get("tool_calls", ())
    ]
    if not calls:
        return message
    said = [message["content"]] if message["content"] else []
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*said, *calls])}


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _shown(tools: Sequence[Mapping[str, Any]]) -> str:
    functions = [tool["function"] for tool in tools]
    example = ", ".join(f'"{name}": …' for name in _properties(functions[0]))
    return "\n".join(
        [
            "You can use these tools:",
            *map(_signature, functions),
            "To use one, write a line like this, and nothing after it:",
            f"{ACTION} {functions[0]['name']} {{{example}}}",
            f'The next message is its result, after "{OBSERVATION}".',
        ]
    )


def _signature(function: Mapping[str, Any]) -> str:
    parameters = [f"{name}: {schema.get('type', 'any')}" for name, schema in _properties(function).items()]
    described = function.get("description")
    return f"{function['name']}({', '.join(parameters)})" + (f" - {described}" if described else "")


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return (function.get("parameters") or {}).get("properties") or {}
