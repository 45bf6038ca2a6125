"""How models write tool calls: one small class per format, chosen by the model's own chat template."""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from agl_core.types.forms import without_halves

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]

    def as_json(self) -> dict[str, str]:
        """The `function` of an OpenAI tool call: arguments are JSON text there."""
        return {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}


def arguments_text(call: Message) -> str:
    """The arguments of a normalised tool call as JSON text; text that is no JSON stays as it is."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A response taken apart. With an error, the content has what is malformed as it was written."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    reasoning: str = ""

    def after(self, before: ParsedReply) -> ParsedReply:
        """The part beyond `before`, which was certain when there was less of the response."""
        content, reasoning = self.content[len(before.content) :], self.reasoning[len(before.reasoning) :]
        return replace(self, content=content, reasoning=reasoning)


def find_mark(text: str, marks: Sequence[str]) -> tuple[int, bool]:
    """The index at which the first of these marks begins, whole or cut by the end of the text, and whether it is whole.

    >>> find_mark("2 < 3 <thi", ["<think>"])
    (6, False)
    """
    whole = [at for mark in marks if (at := text.find(mark)) >= 0]
    if whole:
        return min(whole), True
    longest = min(len(text), max(map(len, marks), default=0))
    cut = (n for n in range(longest, 0, -1) if any(mark.startswith(text[len(text) - n :]) for mark in marks))
    return len(text) - next(cut, 0), False


class MalformedError(ValueError):
    """A text begins as a tool call and is none."""


class ToolFormat(abc.ABC):
    """One way of writing tool calls. Has no state."""

    name: str
    signs: tuple[str, ...] = ()
    """Texts in the chat templates that write tool calls in this format …"""
    no_signs: tuple[str, ...] = ()
    """… and texts that are in no such template."""
    start: tuple[str, str]
    """How a response begins that calls a tool, and how it goes on with the tool's name, which is NAME here."""
    ends: tuple[str, str, str]
    """How a call goes on after its arguments, or one that is JSON after itself; another one begins; the last ends."""
    pair: tuple[str, str] | None = None
    """The texts before and after the value of an argument KEY; None if arguments are JSON."""
    markers: tuple[str, ...] = ()
    """Texts around and in calls; they stay in a response even where a tokenizer calls them special."""
    marks: tuple[str, str] = ("", "")
    """The texts before and after a call; empty if there is no such mark."""
    call: re.Pattern[str] | None = None
    """Finds the name and the arguments in a call; None if it is JSON."""
    argument: re.Pattern[str] | None = None
    """Finds the name and the text of one argument; None if arguments are JSON."""
    id_length: int | None = None
    """Characters of a call's id, of which the last ones are shown; templates of this format refuse another length."""

    def detect(self, template: str) -> bool:
        """True if a chat template writes tool calls in this format."""
        return all(sign in template for sign in self.signs) and not any(sign in template for sign in self.no_signs)

    def forced_prefix(self, tool: str | None) -> str:
        """The text with which a response starts that calls this tool; None: any tool."""
        return self.start[0] + ("" if tool is None else self.start[1].replace("NAME", tool))

    @abc.abstractmethod
    def split(self, text: str) -> tuple[list[str], list[str]]:
        """The texts before, between and after calls, and those of the calls."""

    def read(self, body: str, tools: Tools) -> Iterable[ToolCall]:
        """The calls in the text of one. Arguments that are texts get the types of the tools' schemas.

        Raises MalformedError.
        """
        if self.call is None:
            return [json_call(one_json(body.strip()))]
        call = self.call.fullmatch(body.strip())
        if call is None:
            raise MalformedError(f"the tool call is not like {''.join(self.start)!r}")
        if self.argument is not None:
            return [_call_of_texts(call[1], _pairs(self.argument, call[2]), tools)]
        return [json_call({"name": call[1], "arguments": one_json(call[2].strip())})]

    def find_call(self, text: str) -> int:
        """The index at which a call may begin in a text that goes on; the text's end if there is none."""
        return find_mark(text, self.markers)[0]

    def parse(self, text: str, tools: Tools = ()) -> ParsedReply:
        """Find the calls in a response's text (without its end token); one that is malformed is content."""
        (content, *after), bodies = self.split(text)
        pieces, calls, errors = [content.rstrip()], list[ToolCall](), list[str]()
        for body, outside in zip(bodies, after, strict=True):
            malformed = ""
            try:
                malformed, read = self._read(body, tools)
                calls += read
            except MalformedError as error:
                malformed = body.join(self.marks)
                errors.append(str(error))
            pieces += [malformed.strip(), outside.strip()]
        errors += filter(None, map(self.fault, pieces))
        first = errors[0] if errors else None
        content = "\n".join(filter(None, pieces)) if calls else text
        return ParsedReply(content, tuple(calls), first)

    def _read(self, body: str, tools: Tools) -> tuple[str, Iterable[ToolCall]]:
        """The calls in the text of one, and what stands before it that was begun as a call and not ended."""
        first = self.marks[0]
        cut, begun, rest = body.rpartition(first) if first else ("", "", body)
        readings = [(first + cut, rest), ("", body)] if begun else [("", body)]
        for malformed, text in readings:  # An argument may have the first mark in it.
            try:
                return malformed, list(self.read(without_halves(text), tools))
            except MalformedError as error:
                problem = error
        raise problem

    def fault(self, outside: str) -> str | None:
        """The fault of a text outside of calls, which has a part of one; None if it has none."""
        return None


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
        return [json_call(value, "parameters", "arguments") for value in _json_values(body)]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def one_json(text: str) -> Any:
    """The only JSON value in a text. Raises MalformedError."""
    values = _json_values(text)
    if len(values) > 1:
        raise MalformedError("more than one JSON value in one tool call")
    return values[0]


def _json_values(text: str) -> list[Any]:
    """JSON values separated by semicolons."""
    values = []
    position = 0
    while True:
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise MalformedError(f"the tool call is no JSON: {error}") from None
        values.append(value)
        rest = text[position:].lstrip()
        if not rest:
            return values
        if not rest.startswith(";"):
            raise MalformedError(f"unexpected text after the tool call: {rest[:40]!r}")
        position = len(text) - len(rest[1:].lstrip())


def json_call(value: Any, *keys: str) -> ToolCall:
    """A call that is JSON; `keys` are those that its arguments may have. Raises MalformedError."""
    if not isinstance(value, dict):
        raise MalformedError("the tool call is no JSON object")
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise MalformedError("the tool call has no name")
    arguments = next((value[key] for key in keys or ("arguments",) if key in value), None)
    if not isinstance(arguments, dict):
        raise MalformedError(f"the tool call has no object {(keys or ('arguments',))[0]!r}")
    return ToolCall(value["name"], arguments)


def _pairs(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, str]]:
    """The names and texts of arguments that are written one after the other, and nothing else."""
    position = 0
    while position < len(text.rstrip()):
        match = pattern.match(text, position)
        if match is None:
            raise MalformedError(f"unexpected text among the arguments: {text[position:].strip()[:40]!r}")
        yield match[1].strip(), match[2]
        position = match.end()


def _call_of_texts(name: str, arguments: Iterable[tuple[str, str]], tools: Tools) -> ToolCall:
    """A call whose arguments are texts: each gets the type that the tool's schema names."""
    name = name.strip()
    if not re.fullmatch(r"[^\s<>]+", name):
        raise MalformedError("the tool call has no name")
    functions = (tool["function"] for tool in tools if tool["function"]["name"] == name)
    schema = next((function.get("parameters") or {} for function in functions), {})
    properties, definitions = schema.get("properties") or {}, schema.get("$defs") or {}
    return ToolCall(name, {key: _typed(text, types_of(properties.get(key), definitions)) for key, text in arguments})


_KINDS: Mapping[type, frozenset[str]] = {
    type(None): frozenset({"null"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
    str: frozenset(),
}
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def _typed(text: str, types: frozenset[str]) -> Any:
    """The value of an argument: JSON if it is of one of these types, also as Python writes constants; else the text.

    >>> [_typed("12", frozenset({kind})) for kind in ("integer", "string", "object")]
    [12, '12', '12']
    """
    try:
        value = _DECODER.decode(_CONSTANTS.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text
    return value if types & _KINDS[type(value)] else text


def types_of(schema: Any, definitions: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema allows; those that refer to themselves are not followed further."""
    if not isinstance(schema, dict):
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        name = reference.rpartition("/")[2]
        return types_of(definitions.get(name), {key: value for key, value in definitions.items() if key != name})
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else {*named}
    for choices in ("anyOf", "oneOf", "allOf"):
        types.update(*(types_of(choice, definitions) for choice in schema.get(choices) or ()))
    return frozenset(types)
