"""A reply taken apart as it comes: reasoning between the template's own tags, content, and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from agl_chat import formats
from agl_chat.formats import Parsed, ToolFormat, Tools, find_mark
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
    """What stands before and after a reply's reasoning."""

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


class _Part(Enum):
    START = auto()
    REASONING = auto()
    CONTENT = auto()


class ReplyParser:
    """Takes one reply apart, in pieces of any size.

    What `feed` and `finish` give, added up, is the same for every way to cut the text. Reasoning and content are given
    as soon as they are certain: a possible beginning of a tag or of a call is held back, and so is space that a call
    may follow. Calls are given at the end, since a malformed one makes text of all.

    Reasoning stands at the beginning of a reply, and ends at its tag alone; space around it is dropped.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None = None,
        tools: Tools = (),
        tags: ThinkingTags | None = None,
        *,
        is_thinking: bool = False,
    ) -> None:
        """`is_thinking`: the prompt ends with the first of the tags."""
        self._format, self._tools, self._tags, self._is_thinking = tool_format, tools, tags, is_thinking
        self._part = _Part.CONTENT if tags is None else _Part.START
        self._pending = ""
        """What is neither given nor part of the content."""
        self._has_reasoning = self._is_after_reasoning = False
        self._content, self._given = "", 0
        """The content with its calls, and how many characters of it are given."""
        self._held: list[str] | None = None
        """What follows the content from where the first call begins; None before that."""

    def parse(self, text: str) -> Parsed:
        """A whole reply."""
        return self.feed(text) + self.finish()

    def feed(self, text: str) -> Parsed:
        """What is certain after these characters and was not given before."""
        self._pending += text
        if self._part is _Part.START:
            self._start(is_over=False)
        reasoning = self._reasoning(is_over=False) if self._part is _Part.REASONING else ""
        return Parsed(self._grow() if self._part is _Part.CONTENT else "", reasoning=reasoning)

    def finish(self) -> Parsed:
        """The rest, once there are no more characters; an error is in here."""
        if self._part is _Part.START:
            self._start(is_over=True)
        if self._part is _Part.REASONING:
            return Parsed("", reasoning=self._reasoning(is_over=True))
        grown = self._grow()
        text = self._content + "".join(self._held or ())
        parsed = self._format.parse(text, self._tools) if self._format else Parsed(text)
        return replace(parsed, content=grown + parsed.content[self._given :])

    def _start(self, *, is_over: bool) -> None:
        assert self._tags is not None
        text = self._pending.lstrip()
        if text.startswith(self._tags.first):
            self._part, self._pending = _Part.REASONING, text.removeprefix(self._tags.first)
        elif is_over or not self._tags.first.startswith(text):
            self._part = _Part.REASONING if self._is_thinking else _Part.CONTENT

    def _reasoning(self, *, is_over: bool) -> str:
        assert self._tags is not None
        text = self._pending if self._has_reasoning else self._pending.lstrip()
        before, tag, after = text.partition(self._tags.last)
        end = len(before) if tag or is_over else find_mark(before, 0, (self._tags.last,))[0]
        given = before[:end].rstrip()
        self._has_reasoning = self._has_reasoning or bool(given)
        if tag:
            self._part, self._is_after_reasoning = _Part.CONTENT, True
        self._pending = after if tag else text[len(given) :]
        return given

    def _grow(self) -> str:
        """Add what is pending to the content, and give what has become certain of it."""
        text, self._pending = self._pending, ""
        if self._held is not None:
            self._held.append(text)
            return ""
        self._content += text if self._content or not self._is_after_reasoning else text.lstrip()
        if self._format is None:
            given = self._content[self._given :]
        else:
            end, is_certain = self._format.find_call(self._content, self._given)
            self._held = [] if is_certain else None
            given = self._content[self._given : end].rstrip()
        self._given += len(given)
        return given
