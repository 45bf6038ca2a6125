"""How models write tool calls: one small class per format, chosen by the model's own chat template.

Tools that a template does not know are shown in plain text, as ReAct's lines in ordinary messages:

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agl_chat.parsing import (
    MalformedError,
    Message,
    ToolCall,
    ToolFormat,
    Tools,
    arguments_text,
    json_call,
    json_values,
    one_json,
)


class TaggedFormat(ToolFormat):
    """Each call stands between its marks."""

    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>")
    marks = ("<tool_call>", "</tool_call>")

    def split(self, text: str) -> tuple[list[str], list[str]]:
        (first, last), outside, bodies, after = self.marks, list[str](), list[str](), 0
        while (start := text.find(first, after)) >= 0 and (end := self.find_end(text, start + len(first))) >= 0:
            outside.append(text[after:start])
            bodies.append(text[start + len(first) : end])
            after = end + len(last)
        return [*outside, text[after:]], bodies

    def find_end(self, text: str, start: int) -> int:
        """The position of the last mark of the call whose text begins here; -1 without one."""
        return text.find(self.marks[1], start)

    def fault(self, outside: str) -> str | None:
        first, last = self.marks
        if first in outside:
            return f"{first} is not closed by {last}"
        return f"{last} without {first}" if last in outside else None


class Hermes(TaggedFormat):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, several for parallel calls (Hermes, Qwen 2.5 and 3)."""

    name = "hermes"
    signs, no_signs = ("<tool_call>",), ("<function=", "<arg_key>")  # Later families put XML between the same tags.
    start = ('<tool_call>\n{"name": "', 'NAME", "arguments":')
    ends = ("}\n</tool_call>", '\n<tool_call>\n{"name": "', "")


class QwenXml(TaggedFormat):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>` (Qwen3-Coder, Qwen3.5)."""

    name = "qwen3_coder"
    signs = ("<tool_call>", "<function=")
    start = ("<tool_call>\n<function=", "NAME>\n")
    ends = ("</function>\n</tool_call>", "\n<tool_call>\n<function=", "")
    pair = ("<parameter=KEY>\n", "\n</parameter>\n")
    # Models forget the > after a name, and arguments have marks in them: those that end one have certain others behind.
    call = re.compile(r"<function=([^<>\n]+)[>\n](.*)</function>", re.DOTALL)
    argument = re.compile(r"\s*<parameter=([^<>\n]+)(?:>\n?|\n)(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)
    _BEGIN, _END = re.compile(r"\s*<function="), re.compile(r"(?<=</function>)\s*</tool_call>")

    def find_end(self, text: str, start: int) -> int:
        end = self._END.search(text, start) if self._BEGIN.match(text, start) else None
        return text.find(self.marks[1], end.start() if end else start)


class Glm(TaggedFormat):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>` (GLM 4.5 and later)."""

    name = "glm45"
    signs = ("<tool_call>", "<arg_key>")
    start = ("<tool_call>", "NAME\n")
    ends = ("</tool_call>", "\n<tool_call>", "")
    pair = ("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n")
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    call = re.compile(r"(.*?)((?:<arg_key>.*)?)", re.DOTALL)
    argument = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL)


class DeepSeek(TaggedFormat):
    """`NAME<｜tool▁sep｜>{…}` between tokens of its own, and all calls between two more (DeepSeek V3.1)."""

    name = "deepseek_v31"
    signs: tuple[str, ...] = ("<｜tool▁call▁begin｜>",)
    no_signs: tuple[str, ...] = ("```json",)
    start = ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "NAME<｜tool▁sep｜>{")
    ends = ("<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>")
    markers = (
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    )
    marks = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    call = re.compile(r"([^\s<]+)\s*<｜tool▁sep｜>(.*)", re.DOTALL)

    def split(self, text: str) -> tuple[list[str], list[str]]:
        outside, bodies = super().split(text)
        if bodies:
            outside = [piece.replace(self.markers[3], "").replace(self.markers[4], "") for piece in outside]
        return outside, bodies

    def fault(self, outside: str) -> str | None:
        return f"{self.markers[3]} without a call" if self.markers[3] in outside else super().fault(outside)


class DeepSeekFenced(DeepSeek):
    """The same with `function<｜tool▁sep｜>NAME`, and the arguments as a block of Markdown (DeepSeek V3, R1)."""

    name = "deepseek_v3"
    signs, no_signs = ("<｜tool▁call▁begin｜>", "```json"), ()
    start = ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "NAME\n```json\n{")
    ends = ("\n```<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁calls▁end｜>")
    call = re.compile(r"function<｜tool▁sep｜>([^\n]+)\n```json\n(.*)\n```", re.DOTALL)


class MistralNamed(ToolFormat):
    """`[TOOL_CALLS]NAME[ARGS]{…}` for each call (Mistral's tokenizers 11 and 13; 11 also has `[CALL_ID]`)."""

    name = "mistral_named"
    signs: tuple[str, ...] = ("[TOOL_CALLS]", "[ARGS]")
    no_signs: tuple[str, ...] = ()
    start = ("[TOOL_CALLS]", "NAME[ARGS]{")
    ends = ("", "[TOOL_CALLS]", "")
    markers: tuple[str, ...] = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    marks = ("[TOOL_CALLS]", "")
    call = re.compile(r"([^\s\[{]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
    id_length = 9

    def split(self, text: str) -> tuple[list[str], list[str]]:
        content, *bodies = text.split("[TOOL_CALLS]")
        return [content, *[""] * len(bodies)], bodies


class Mistral(MistralNamed):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]` at the end of a response (Mistral, before its tokenizer 11)."""

    name = "mistral"
    signs, no_signs = ("[TOOL_CALLS]",), ("[ARGS]",)
    start = ('[TOOL_CALLS][{"name": "', 'NAME", "arguments":')
    ends = ("}", ', {"name": "', "]")
    markers = ("[TOOL_CALLS]",)

    def read(self, body: str, tools: Tools) -> Iterable[ToolCall]:
        values = one_json(body.strip())
        if not isinstance(values, list) or not values:
            raise MalformedError("the tool calls are no JSON array of calls")
        return map(json_call, values)


class LlamaJson(ToolFormat):
    """`{"name": …, "parameters": {…}}` as the whole response, after an optional `<|python_tag|>` (Llama 3.1, 3.2).

    Several objects separated by semicolons are parallel calls.
    """

    name = "llama3_json"
    start = ('{"name": "', 'NAME", "parameters":')
    ends = ("", "; ", "")
    markers = ("<|python_tag|>",)
    _BEGINNINGS = ('{"name"', '{"type"', '{"parameters"', '{"function"')
    _OBJECT = re.compile(r'\{\s*"(name|type|parameters|function)"')

    def detect(self, template: str) -> bool:
        return '"parameters"' in template and ("<|python_tag|>" in template or "ipython" in template)

    def find_call(self, text: str) -> int:
        body = text.lstrip()
        if body.startswith(self.markers[0]) or self._OBJECT.match(body):
            return 0
        begun = re.sub(r"^\{\s*", "{", body)
        may_begin = any(beginning.startswith(begun) for beginning in (self.markers[0], *self._BEGINNINGS))
        return 0 if may_begin else len(text)

    def split(self, text: str) -> tuple[list[str], list[str]]:
        body = text.strip()
        if body.startswith(self.markers[0]):
            return ["", ""], [body.removeprefix(self.markers[0]).strip()]
        return (["", ""], [body]) if self._OBJECT.match(body) else ([text], [])

    def read(self, body: str, tools: Tools) -> Iterable[ToolCall]:
        return [json_call(value, "parameters", "arguments") for value in json_values(body)]


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


FORMATS: tuple[ToolFormat, ...] = (
    Hermes(), QwenXml(), Glm(), DeepSeek(), DeepSeekFenced(), Mistral(),
    MistralNamed(), LlamaJson(), PlainText(),
)  # fmt: skip


def detect_format(template: str) -> ToolFormat | None:
    """The format in which a chat template writes tool calls, or None.

    >>> detect_format("{{ '<tool_call>' }}").name
    'hermes'
    """
    return next((candidate for candidate in FORMATS if candidate.detect(template)), None)
