"""Tool-call formats: which one a template uses, and what a response says in it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_torch.formats import FORMATS, ToolFormat, detect_format, in_plain_text

from .conftest import CALCULATOR, CHATML, LLAMA

HERMES, LLAMA_JSON, PLAIN = FORMATS
names = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
arguments = st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=20) | st.lists(st.text()))


def test_the_template_tells_the_format() -> None:
    assert detect_format(CHATML) is HERMES
    assert detect_format(LLAMA) is LLAMA_JSON
    assert detect_format("{{ messages }}") is PLAIN
    assert detect_format("{{ tools }}<tool_call><function=f><parameter=x>") is None


@settings(max_examples=30)
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
    ("tool_format", "text", "error"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}', "not closed"),
        (HERMES, '{"name": "f", "arguments": {}}</tool_call>', "without"),
        (HERMES, "<tool_call>{broken</tool_call>", "no JSON"),
        (HERMES, "<tool_call></tool_call>", "no JSON"),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', "no name"),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', "'arguments'"),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "'arguments'"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "no JSON"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>', "unexpected text"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{</tool_call>', "no JSON"),
        (LLAMA_JSON, '{"name": "f", "parameters": {', "no JSON"),
        (LLAMA_JSON, "<|python_tag|>f(x=1)", "no JSON"),
        (LLAMA_JSON, '{"name": "f"}', "'parameters'"),
        (PLAIN, "Action: f", "no JSON"),
        (PLAIN, "Action: f {", "no JSON"),
        (PLAIN, "Action: f [1]", "'arguments'"),
        (PLAIN, 'Action: {"x": 1}', "a tool's name"),
        (PLAIN, "Action: f {} and more", "unexpected text"),
        (PLAIN, "Action: f {}; {}", "more than one"),
        (PLAIN, "Action: f {}\nAction: g", "no JSON"),
    ],
)
def test_a_malformed_call_is_content_with_an_error(tool_format: ToolFormat, text: str, error: str) -> None:
    parsed = tool_format.parse(text)
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


@given(st.lists(st.tuples(names, arguments), min_size=1, max_size=3))
def test_plain_calls_survive_writing_and_parsing(calls: list[tuple[str, dict]]) -> None:
    functions = [{"function": {"name": name, "arguments": args}} for name, args in calls]
    (written,) = in_plain_text([{"role": "assistant", "content": "Let me see.", "tool_calls": functions}], None)
    parsed = PLAIN.parse(written["content"])
    assert (parsed.content, parsed.error) == ("Let me see.", None)
    assert [(call.name, call.arguments) for call in parsed.calls] == calls


def test_tools_in_plain_text_join_the_system_message() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}, CALCULATOR]
    asked = {"role": "user", "content": "hello"}
    (alone, user) = in_plain_text([asked], tools)
    assert user == asked
    assert "now()\ncalculator(expression: any)\n" in alone["content"]
    (joined, _) = in_plain_text([{"role": "system", "content": "Be brief."}, asked], tools)
    assert joined == {"role": "system", "content": f"Be brief.\n\n{alone['content']}"}
    assert in_plain_text([asked, {"role": "tool", "tool_call_id": "a", "content": "42"}], None) == [
        asked,
        {"role": "user", "content": "Observation: 42"},
    ]


@pytest.mark.parametrize(
    ("tool_format", "rest", "name"),
    [
        (HERMES, ' {"x": 1}}</tool_call>', 'g", "arguments": {}}</tool_call>'),
        (LLAMA_JSON, ' {"x": 1}}', 'g", "parameters": {}}'),
        (PLAIN, '"x": 1}', "g {}"),
    ],
)
def test_a_forced_prefix_is_the_beginning_of_a_call(tool_format: ToolFormat, rest: str, name: str) -> None:
    (call,) = tool_format.parse(f"{tool_format.forced_prefix('f')}{rest}").calls
    assert (call.name, call.arguments) == ("f", {"x": 1})
    assert [call.name for call in tool_format.parse(f"{tool_format.forced_prefix(None)}{name}").calls] == ["g"]
