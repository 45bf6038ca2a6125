"""Tool-call formats: which one a template uses, and what a response says in it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_torch.chat import FORMATS, detect_format

from .conftest import CHATML, LLAMA

HERMES, LLAMA_JSON = FORMATS
names = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
arguments = st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=20) | st.lists(st.text()))


def test_the_template_tells_the_format() -> None:
    assert detect_format(CHATML) is HERMES
    assert detect_format(LLAMA) is LLAMA_JSON
    assert detect_format("{{ messages }}") is None
    assert detect_format("<tool_call><function=f><parameter=x>") is None


@given(st.lists(st.tuples(names, arguments), min_size=1, max_size=3))
def test_hermes_calls_survive_writing_and_parsing(calls: list[tuple[str, dict]]) -> None:
    written = [json.dumps({"name": name, "arguments": args}) for name, args in calls]
    written = [body for body in written if "tool_call>" not in body]
    parsed = HERMES.parse("Let me see.\n" + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in written))
    if written:
        assert parsed.error is None
        assert parsed.content == "Let me see."
        assert [{"name": c.name, "arguments": c.arguments} for c in parsed.calls] == [json.loads(b) for b in written]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('<tool_call>{"name": "f", "arguments": {}}', "not closed"),
        ('{"name": "f", "arguments": {}}</tool_call>', "without"),
        ("<tool_call>{broken</tool_call>", "no JSON"),
        ("<tool_call></tool_call>", "no JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', "no name"),
        ('<tool_call>{"name": "f"}</tool_call>', "'arguments'"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "'arguments'"),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "no JSON"),
        ('<tool_call>{"name": "f", "arguments": {}} and more</tool_call>', "unexpected text"),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{</tool_call>', "no JSON"),
    ],
)
def test_a_malformed_hermes_call_is_content_with_an_error(text: str, error: str) -> None:
    parsed = HERMES.parse(text)
    assert (parsed.content, parsed.calls) == (text, ())
    assert parsed.error is not None
    assert error in parsed.error


def test_plain_text_is_plain_text() -> None:
    for tool_format in FORMATS:
        for text in ("", " 4 < 5 ", '{"answer": 42}', "[1, 2]"):
            parsed = tool_format.parse(text)
            assert (parsed.content, parsed.calls, parsed.error) == (text, (), None)


@pytest.mark.parametrize(
    "text", ['{"name": "f", "parameters": {"x": 1}}', ' <|python_tag|>{"name":"f","parameters":{"x":1}}']
)
def test_llama_calls(text: str) -> None:
    (call,) = LLAMA_JSON.parse(text).calls
    assert (call.name, call.arguments) == ("f", {"x": 1})


def test_llama_parallel_calls() -> None:
    parsed = LLAMA_JSON.parse('{"name": "f", "parameters": {}} ; {"name": "g", "parameters": {"y": "; }"}}')
    assert [(call.name, call.arguments) for call in parsed.calls] == [("f", {}), ("g", {"y": "; }"})]


@pytest.mark.parametrize("text", ['{"name": "f", "parameters": {', "<|python_tag|>f(x=1)", '{"name": "f"}'])
def test_a_malformed_llama_call_is_content_with_an_error(text: str) -> None:
    parsed = LLAMA_JSON.parse(text)
    assert (parsed.content, parsed.calls) == (text, ())
    assert parsed.error


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_forced_prefix_is_the_beginning_of_a_call(tool_format) -> None:
    close = tool_format.call_end or ""
    named = tool_format.forced_prefix("f") + ' {"x": 1}}' + close
    (call,) = tool_format.parse(named).calls
    assert (call.name, call.arguments) == ("f", {"x": 1})
    any_tool = tool_format.forced_prefix(None) + 'g", "arguments": {}}' + close
    assert [call.name for call in tool_format.parse(any_tool).calls] == ["g"]
