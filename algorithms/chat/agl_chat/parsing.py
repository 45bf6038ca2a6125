"""A reply taken apart, whole or as it comes: reasoning between the template's own tags, content, and tool calls."""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        """The calls in the text of one; texts get the types of the tools' schemas. Raises MalformedError."""
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


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def one_json(text: str) -> Any:
    """The only JSON value in a text. Raises MalformedError."""
    values = json_values(text)
    if len(values) > 1:
        raise MalformedError("more than one JSON value in one tool call")
    return values[0]


def json_values(text: str) -> list[Any]:
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


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """The tags before and after a reply's reasoning."""

    first: str
    last: str


THINKING_TAGS = (
    ThinkingTags("<think>", "</think>"),
    ThinkingTags("[THINK]", "[/THINK]"),
    ThinkingTags("<seed:think>", "</seed:think>"),
)


def detect_thinking(template: str) -> ThinkingTags | None:
    """The tags between which a chat template writes reasoning, or None.

    >>> detect_thinking("{{ content.split('</think>')[-1] }}").first
    '<think>'
    """
    return next((tags for tags in THINKING_TAGS if tags.last in template), None)


@dataclass(frozen=True, slots=True)
class ReplyParser:
    """Takes a reply apart. Reasoning stands at its beginning, and ends at its tag alone; space around it is dropped."""

    tool_format: ToolFormat | None = None
    tools: Tools = ()
    tags: ThinkingTags | None = None
    is_thinking: bool = False
    """The prompt ends with the first of the tags."""

    def parse(self, text: str, *, is_over: bool = True) -> ParsedReply:
        """The message of a reply; of one that goes on, the part that is certain, which more text only adds to.

        A possible beginning of a tag or of a call is not certain, nor are calls: a malformed one is text.
        """
        reasoning, content = self._split_reasoning(text, is_over)
        if self.tool_format is None:
            return ParsedReply(content, reasoning=reasoning)
        if is_over:
            return replace(self.tool_format.parse(content, self.tools), reasoning=reasoning)
        return ParsedReply(content[: self.tool_format.find_call(content)].rstrip(), reasoning=reasoning)

    def _split_reasoning(self, text: str, is_over: bool) -> tuple[str, str]:
        if self.tags is None:
            return "", text
        first, last = self.tags.first, self.tags.last
        begun = text.lstrip()
        if begun.startswith(first):
            text = begun.removeprefix(first)
        elif first.startswith(begun) and not is_over:
            return "", ""
        elif not self.is_thinking:
            return "", text
        reasoning, tag, content = text.partition(last)
        if not tag and not is_over:
            reasoning = reasoning[: find_mark(reasoning, (last,))[0]]
        return reasoning.strip(), content.lstrip()


_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Tokenizers decode a part of a character to this."""


class ResponseText:
    """The text of one response, cut at the first stop string; the parts from `feed` and `end` add up to `parsed`."""

    def __init__(self, decode: Callable[[Sequence[int]], str], parser: ReplyParser, stops: Sequence[str]) -> None:
        self.ids: list[int] = []
        self.parsed = ParsedReply("")
        self.stop: str | None = None
        """The stop string that the response has."""
        self._decode, self._parser, self._stops = decode, parser, stops
        self._decoded = ""
        self._start = self._known = 0
        """Some tokens are decoded twice, since a token's text depends on those before it: from `_start` on."""

    def feed(self, ids: Sequence[int]) -> ParsedReply:
        """The part of the message that is certain after these tokens and was not before."""
        self.ids += ids
        piece = self._piece()
        if piece.endswith(_UNFINISHED):
            return ParsedReply("")
        if piece:
            self._start = self._known
        self._known = len(self.ids)
        return self._parse(piece, is_over=False)

    def end(self) -> ParsedReply:
        """The rest, once there are no more tokens."""
        return self._parse(self._piece(), is_over=True)

    def _piece(self) -> str:
        before = self._decode(self.ids[self._start : self._known])
        return self._decode(self.ids[self._start :])[len(before) :]

    def _parse(self, piece: str, *, is_over: bool) -> ParsedReply:
        self._decoded += piece
        at, is_whole = find_mark(self._decoded, self._stops)
        if is_whole:
            self.stop = next(stop for stop in self._stops if self._decoded.startswith(stop, at))
        parsed = self._parser.parse(self._decoded[: None if is_over and not is_whole else at], is_over=is_over)
        before, self.parsed = self.parsed, parsed
        return parsed.after(before)
