"""A reply taken apart, whole or as it comes: reasoning between the template's own tags, content, and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agl_chat import formats
from agl_chat.formats import ParsedReply, ToolFormat, Tools, find_mark
from agl_chat.plain_text import PlainText

FORMATS: tuple[ToolFormat, ...] = (
    formats.Hermes(), formats.QwenXml(), formats.Glm(), formats.DeepSeek(), formats.DeepSeekFenced(), formats.Mistral(),
    formats.MistralNamed(), formats.LlamaJson(), PlainText(),
)  # fmt: skip


def detect_format(template: str) -> ToolFormat | None:
    """The format in which a chat template writes tool calls, or None.

    >>> detect_format("{{ '<tool_call>' }}").name
    'hermes'
    """
    return next((candidate for candidate in FORMATS if candidate.detect(template)), None)


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
    """Takes a reply apart, whole or as far as it has come.

    Reasoning stands at the beginning of a reply, and ends at its tag alone; space around it is dropped.
    """

    tool_format: ToolFormat | None = None
    tools: Tools = ()
    tags: ThinkingTags | None = None
    is_thinking: bool = False
    """The prompt ends with the first of the tags."""

    def parse(self, text: str, *, is_over: bool = True) -> ParsedReply:
        """The message of a reply; of one that goes on, the part that is certain, which more text only adds to.

        A possible beginning of a tag or of a call is not certain, nor is space that a call may follow. Calls come at
        the end, since a malformed one is text.
        """
        reasoning, content = self._split_reasoning(text, is_over)
        if self.tool_format is None:
            return ParsedReply(content, reasoning=reasoning)
        if is_over:
            return replace(self.tool_format.parse(content, self.tools), reasoning=reasoning)
        return ParsedReply(content[: self.tool_format.find_call(content)].rstrip(), reasoning=reasoning)

    def _split_reasoning(self, text: str, is_over: bool) -> tuple[str, str]:
        """Reasoning, and what follows it."""
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
    """The text of one response: decoded, cut at the first stop string, taken apart.

    Whole responses are fed in one piece. The parts from `feed` and `end` add up to `parsed`.
    """

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
