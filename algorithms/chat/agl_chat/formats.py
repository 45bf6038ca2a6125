"""How models write tool calls: one small class per format, chosen by the model's own chat template.

A template that knows no tools gets them in plain text, as ReAct's lines in ordinary messages:

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
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from agl_core.types.forms import without_halves

Message = dict[str, Any]

ACTION, OBSERVATION = "Action:", "Observation:"


def in_plain_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """The conversation without tools: they are in the system message, calls and results in the text of the others."""
    texts = [_message_in_text(message) for message in messages]
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
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        lines.append(f"{ACTION} {call['function']['name']} {arguments}")
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


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model asked for."""

    name: str
    arguments: dict[str, Any]

    def as_json(self) -> dict[str, str]:
        """The `function` of an OpenAI tool call: arguments are JSON text there."""
        return {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}


@dataclass(frozen=True, slots=True)
class Parsed:
    """A response taken apart. With an error there are no calls, and the content is the whole text."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    error: str | None = None


class ToolFormat(Protocol):
    """One way of writing tool calls. Has no state."""

    name: str
    markers: tuple[str, ...]
    """Tokens of the format; they stay in the text even where a tokenizer calls them special."""
    call_end: str | None
    """The mark that ends one call; None if the format has none."""

    def detect(self, template: str) -> bool:
        """True if a chat template writes tool calls in this format."""

    def parse(self, text: str) -> Parsed:
        """Find the calls in a response's text (without its end token)."""

    def forced_prefix(self, tool: str | None) -> str:
        """The start of every response that calls this tool; None: of any tool."""


class _MalformedError(ValueError):
    pass


class Hermes:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, several for parallel calls (Hermes, Qwen)."""

    name = "hermes"
    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>")
    call_end: str | None = "</tool_call>"

    def detect(self, template: str) -> bool:
        # Later families put XML between the same tags.
        return "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template

    def parse(self, text: str) -> Parsed:
        first, last = self.markers
        if first not in text and last not in text:
            return Parsed(text)
        pieces = re.split(f"{re.escape(first)}(.*?){re.escape(last)}", text, flags=re.DOTALL)
        outside, inside = pieces[::2], pieces[1::2]
        try:
            for piece in outside:
                if first in piece:
                    raise _MalformedError(f"{first} is not closed by {last}")
                if last in piece:
                    raise _MalformedError(f"{last} without {first}")
            calls = tuple(_call(_one_json(body.strip()), ("arguments",)) for body in inside)
        except _MalformedError as error:
            return Parsed(text, error=str(error))
        return Parsed("\n".join(piece.strip() for piece in outside if piece.strip()), calls)

    def forced_prefix(self, tool: str | None) -> str:
        return self.markers[0] + '\n{"name": "' + ("" if tool is None else f'{tool}", "arguments":')


class LlamaJson:
    """`{"name": …, "parameters": {…}}` as the whole response, after an optional `<|python_tag|>` (Llama 3.1, 3.2).

    Several objects separated by semicolons are parallel calls.
    """

    name = "llama3_json"
    markers: tuple[str, ...] = ("<|python_tag|>",)
    call_end: str | None = None

    def detect(self, template: str) -> bool:
        return '"parameters"' in template and ("<|python_tag|>" in template or "ipython" in template)

    def parse(self, text: str) -> Parsed:
        tag = self.markers[0]
        body = text.strip()
        tagged = body.startswith(tag)
        body = body.removeprefix(tag).strip()
        if not tagged and not re.match(r'\{\s*"(name|type|parameters|function)"', body):
            return Parsed(text)
        try:
            return Parsed("", tuple(_call(value, ("parameters", "arguments")) for value in _json_values(body)))
        except _MalformedError as error:
            return Parsed(text, error=str(error))

    def forced_prefix(self, tool: str | None) -> str:
        return '{"name": "' + ("" if tool is None else f'{tool}", "parameters":')


class PlainText:
    """`Action: NAME {…}` on a line of its own, several lines for parallel calls: where the template knows no tools.

    How tools, calls and results are shown to the model is in `agl_chat.formats`.
    """

    name = "plain_text"
    markers: tuple[str, ...] = ()
    call_end: str | None = None

    def detect(self, template: str) -> bool:
        return "tool" not in template

    def parse(self, text: str) -> Parsed:
        content: list[str] = []
        calls: list[ToolCall] = []
        try:
            for line in text.split("\n"):
                if line.startswith(ACTION):
                    name, _, arguments = line.removeprefix(ACTION).strip().partition(" ")
                    if not re.fullmatch(r"[\w.-]+", name):
                        raise _MalformedError(f"after {ACTION} comes a tool's name, and then its arguments")
                    calls.append(_call({"name": name, "arguments": _one_json(arguments.strip())}, ("arguments",)))
                else:
                    content.append(line)
        except _MalformedError as error:
            return Parsed(text, error=str(error))
        return Parsed("\n".join(content).strip(), tuple(calls)) if calls else Parsed(text)

    def forced_prefix(self, tool: str | None) -> str:
        return f"{ACTION} " + ("" if tool is None else f"{tool} {{")


FORMATS: tuple[ToolFormat, ...] = (Hermes(), LlamaJson(), PlainText())


def detect_format(template: str) -> ToolFormat | None:
    """The format in which a chat template writes tool calls, or None.

    >>> detect_format("{{ '<tool_call>' }}").name
    'hermes'
    """
    return next((candidate for candidate in FORMATS if candidate.detect(template)), None)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _one_json(text: str) -> Any:
    values = _json_values(text)
    if len(values) > 1:
        raise _MalformedError("more than one JSON value in one tool call")
    return values[0]


def _json_values(text: str) -> list[Any]:
    """JSON values separated by semicolons."""
    text = without_halves(text)
    values = []
    position = 0
    while True:
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise _MalformedError(f"the tool call is no JSON: {error}") from None
        values.append(value)
        rest = text[position:].lstrip()
        if not rest:
            return values
        if not rest.startswith(";"):
            raise _MalformedError(f"unexpected text after the tool call: {rest[:40]!r}")
        position = len(text) - len(rest[1:].lstrip())


def _call(value: Any, keys: Sequence[str]) -> ToolCall:
    if not isinstance(value, dict):
        raise _MalformedError("the tool call is no JSON object")
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise _MalformedError("the tool call has no name")
    arguments = next((value[key] for key in keys if key in value), None)
    if not isinstance(arguments, dict):
        raise _MalformedError(f"the tool call has no object {keys[0]!r}")
    return ToolCall(value["name"], arguments)
