"""Tool calls are read as vLLM's parsers read them: `parsers.jsonl` has what those gave (`live_parsers.py` makes it)."""

from __future__ import annotations

import json

import pytest

from agl_chat.parsing import FORMATS, THINKING_TAGS, ReplyParser

from .parser_cases import FIXTURE, MALFORMED, PROSE_AFTER, REASONING_PARSERS, THOUGHTS, TOOLS, UNKNOWN, WRITERS, texts

BY_NAME = {tool_format.name: tool_format for tool_format in FORMATS}
LINES = [json.loads(line) for line in FIXTURE.read_text().splitlines()]
OF_VLLM = [line for line in LINES if line[1] not in THOUGHTS]
REASONING_OF_VLLM = [line for line in LINES if line[1] in THOUGHTS]


def test_the_fixture_holds_every_case_and_nothing_else() -> None:
    assert [(name, case) for name, case, *_ in OF_VLLM] == [(name, case) for name in WRITERS for case in texts(name)]
    assert [line[:2] for line in REASONING_OF_VLLM] == [[name, text] for name in REASONING_PARSERS for text in THOUGHTS]


@pytest.mark.parametrize(("name", "case", "content_of_vllm", "calls_of_vllm"), OF_VLLM)
def test_calls_are_read_as_vllm_reads_them(name: str, case: str, content_of_vllm: str, calls_of_vllm: list) -> None:
    text = texts(name)[case]
    parsed = BY_NAME[name].parse(text, TOOLS)
    calls = [[call.name, call.arguments] for call in parsed.calls]

    # On purpose, a malformed call is an error and stays text; vLLM drops it, or makes a call of a part of it. The good
    # ones beside it are calls, and an argument may have the mark in it that ends one.
    if (case, name) in [(MALFORMED[-1], "qwen3_coder"), (MALFORMED[-1], "glm45")]:
        # Texts need not be JSON: one that has not the type of the schema is for the tool to refuse; vLLM empties it.
        assert (calls, calls_of_vllm) == ([["add", {"i": "?", "x": 0.5}]], [["add", {"i": "", "x": 0.5}]])
    elif case == MALFORMED[1] and name not in ("mistral", "llama3_json"):
        assert parsed.error
        assert calls == [["add", {"i": 12, "x": 0.5}]]
        assert parsed.content
    elif (case, name) in [(MALFORMED[2], "qwen3_coder"), (MALFORMED[2], "glm45")]:
        assert calls[0][1]["i"] in text
    elif case in MALFORMED:
        assert parsed.error
        assert (parsed.content, calls) == (text, [])
    # vLLM drops text after calls. Here it is kept, or an error where nothing ends a call.
    elif case == PROSE_AFTER:
        assert content_of_vllm == ""
        if not BY_NAME[name].marks[1]:
            assert "That is it." in (parsed.error or "")
        else:
            assert (parsed.content, calls) == ("That is it.", calls_of_vllm)
    # vLLM drops a call of an unknown tool in this format alone. Here the agent gets it, and can say so to the model.
    elif (name, case) == ("glm45", UNKNOWN):
        assert calls_of_vllm == []
        assert calls == [["divide", {"s": "1"}]]
    # A Llama call is the whole response: an agent may well be told in JSON what is not a call.
    elif (name, case) == ("llama3_json", "after prose"):
        assert (parsed.content, calls, parsed.error) == (text, [], None)
    else:
        assert (parsed.content.strip(), calls, parsed.error) == (content_of_vllm.strip(), calls_of_vllm, None)


@pytest.mark.parametrize(("name", "text", "content_of_vllm", "reasoning_of_vllm"), REASONING_OF_VLLM)
def test_reasoning_is_read_as_vllm_reads_it(name: str, text: str, content_of_vllm: str, reasoning_of_vllm: str) -> None:
    """But for space around it, which vLLM's parsers keep. They take every prompt for one that begins the reasoning."""
    parsed = ReplyParser(tags=THINKING_TAGS[0], is_thinking=True).parse(text)
    assert (parsed.content, parsed.reasoning) == (content_of_vllm.strip(), reasoning_of_vllm.strip())
