"""Replies taken apart as they come say what the whole text says."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_chat.formats import Parsed, ToolCall, ToolFormat
from agl_chat.parsing import FORMATS, THINKING_TAGS, ReplyParser, ThinkingTags

from .parser_cases import TOOLS, WRITERS, texts

THINK = THINKING_TAGS[0]
WRITTEN = {name: [*texts(name).values()] for name in WRITERS}
WRITTEN["plain_text"] = [
    "Act",
    'Action: add {"i": 12}',
    "Let me see.\nAction: add {}\nAction: add {}\n\n",
    "Action: add {",
    "Act",
]


@st.composite
def replies(draw: st.DrawFn) -> tuple[ToolFormat | None, ThinkingTags | None, bool, str]:
    """A format or none, tags or none, whether the prompt opens them, and text made of what stands in such replies."""
    tool_format = draw(st.sampled_from([None, *FORMATS]))
    written = WRITTEN[tool_format.name] if tool_format else ["prose"]
    marks = st.sampled_from([*(tool_format.markers if tool_format else ()), THINK.first, THINK.last, "Action:", "{"])
    parts = st.sampled_from(["\n", " ", "\n\n", "a", "é < 2", '"name"', ": "]) | marks | st.sampled_from(written)
    parts = parts | marks.map(lambda mark: mark[: len(mark) // 2])
    tags = draw(st.sampled_from([None, THINK]))
    return tool_format, tags, draw(st.booleans()), "".join(draw(st.lists(parts, max_size=8)))


@settings(max_examples=400, deadline=None)
@given(replies())
def test_what_is_certain_only_grows_to_the_whole(reply: tuple) -> None:
    tool_format, tags, is_thinking, text = reply

    parser = ReplyParser(tool_format, TOOLS, tags, is_thinking)
    whole = parser.parse(text)
    before = Parsed("")
    for end in range(len(text) + 1):
        certain = parser.parse(text[:end], is_over=False)
        assert certain.calls == ()
        assert certain.content.startswith(before.content)
        assert certain.reasoning.startswith(before.reasoning)
        before = certain
    assert whole.content.startswith(before.content)
    assert whole.reasoning.startswith(before.reasoning)


def deltas(parser: ReplyParser, *pieces: str) -> list[Parsed]:
    """The additions of each piece, and of the end."""
    texts = list(accumulate(pieces))
    parsed = [Parsed(""), *(parser.parse(text, is_over=False) for text in texts), parser.parse(texts[-1])]
    return [later.after(before) for before, later in pairwise(parsed)]


def test_what_is_certain_is_given_at_once_and_what_may_be_a_mark_is_not() -> None:
    pieces = [
        "<thi",
        "nk>\nI s",
        "ee. </th",
        "ink>\n\nIt is",
        " 1 <",
        " 2.\n<tool",
        '_call>{"name": "add", ',
        '"arguments": {}}',
    ]
    given = deltas(ReplyParser(FORMATS[0], TOOLS, THINK), *pieces, "</tool_call>")
    assert [(delta.reasoning, delta.content) for delta in given] == [
        ("", ""), ("I s", ""), ("ee.", ""), ("", "It is"), ("", " 1"), ("", " < 2."), *[("", "")] * 4
    ]  # fmt: skip
    assert given[-1].calls == (ToolCall("add", {}),)


@pytest.mark.parametrize("name", [*WRITERS, "plain_text"])
def test_prose_is_given_before_its_end(name: str) -> None:
    tool_format = next(tool_format for tool_format in FORMATS if tool_format.name == name)
    first, second, rest = deltas(ReplyParser(tool_format), "So it is", " 42.")
    assert (first.content + second.content, rest) == ("So it is 42.", Parsed(""))


@pytest.mark.parametrize(
    ("text", "is_thinking", "reasoning", "content"),
    [
        ("<think>\na\n b\n</think>\n\nc", False, "a\n b", "c"),
        ("a</think>c", True, "a", "c"),
        ("<think>a</think>c", True, "a", "c"),
        ("<think>\n\n</think>\n\nc", False, "", "c"),
        ("<think>a", False, "a", ""),  # cut
        ("a </thi", True, "a </thi", ""),
        (" a</think>c", False, "", " a</think>c"),  # vLLM takes any text as reasoning before it has ended
        ("So <think>a</think>", False, "", "So <think>a</think>"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
    ],
)
def test_reasoning(text: str, is_thinking: bool, reasoning: str, content: str) -> None:
    assert ReplyParser(None, (), THINK, is_thinking).parse(text) == Parsed(content, reasoning=reasoning)


def test_calls_among_thoughts_are_thoughts() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    parsed = ReplyParser(FORMATS[0], TOOLS, THINK).parse(f"<think>{call}</think>{call}")
    assert parsed == Parsed("", (ToolCall("add", {}),), reasoning=call)
