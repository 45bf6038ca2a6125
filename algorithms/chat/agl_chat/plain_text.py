"""Tools, calls and results in plain text, for models whose chat template knows no tools.

They are shown as ReAct's lines in ordinary messages:

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

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agl_chat.formats import Message, ToolFormat, Tools, arguments_text

ACTION, OBSERVATION = "Action:", "Observation:"


def in_plain_text(messages: Sequence[Message], tools: Tools | None) -> list[Message]:
    """The conversation without tools: they are in the system message, calls and results in the text of the others."""
    texts: list[Message] = []
    for message, before in zip(messages, [None, *messages], strict=False):
        text = _message_in_text(message)
        if before and before["role"] == message["role"] == "tool":  # Some templates refuse two of a user's in a row.
            text = {**text, "content": f"{texts.pop()['content']}\n{text['content']}"}
        texts.append(text)
    if tools:
        shown = _tools_in_text([tool["function"] for tool in tools])
        if texts and texts[0]["role"] == "system":
            texts[0] = {**texts[0], "content": f"{texts[0]['content']}\n\n{shown}"}
        else:
            texts.insert(0, {"role": "system", "content": shown})
    return texts


def _message_in_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"{OBSERVATION} {message['content']}"}
    lines = [message["content"]] if message["content"] else []
    lines += [f"{ACTION} {call['function']['name']} {arguments_text(call)}" for call in message.get("tool_calls", ())]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(lines)}


def _tools_in_text(functions: Sequence[Mapping[str, Any]]) -> str:
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
    description = function.get("description")
    return f"{function['name']}({', '.join(parameters)})" + (f" - {description}" if description else "")


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return (function.get("parameters") or {}).get("properties") or {}


class PlainText(ToolFormat):
    """`Action: NAME {…}` on a line of its own, several lines for parallel calls: where the template knows no tools.

    How tools, calls and results are shown to the model is at the top of this file.
    """

    name = "plain_text"
    no_signs = ("tool",)
    start = (f"{ACTION} ", "NAME {")
    ends = ("", f"\n{ACTION} ", "")
    marks = (ACTION, "")
    call = re.compile(r"([\w.-]+)(?: |$)(.*)")
    _LINE = re.compile(f"^{ACTION}(.*)$", re.MULTILINE)

    def find_call(self, text: str) -> int:
        if line := self._LINE.search(text):
            return line.start()
        last = text.rfind("\n") + 1
        return last if ACTION.startswith(text[last:]) else len(text)

    def split(self, text: str) -> tuple[list[str], list[str]]:
        pieces = self._LINE.split(text)
        return pieces[::2], pieces[1::2]
