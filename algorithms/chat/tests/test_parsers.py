"""Tool-call formats; vLLM reads calls alike: `parsers.jsonl` has what its parsers gave (`live_parsers.py` makes it)."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CHATML, LLAMA

from agl_chat.formats import FORMATS, detect_format, in_plain_text
from agl_chat.parsing import THINKING_TAGS, ParsedReply, ReplyParser, ThinkingTags, ToolCall, ToolFormat

from .conftest import CALCULATOR
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


HERMES, XML, LLAMA_JSON, PLAIN = *FORMATS[:2], *FORMATS[-2:]
names = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
arguments = st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=20) | st.lists(st.text()))


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (CHATML, "hermes"),
        (LLAMA, "llama3_json"),
        ("{{ messages }}", "plain_text"),
        ("{{ tools }}<tool_call><function=f><parameter=x>", "qwen3_coder"),
        ("{{ tools }}<tool_call>f<arg_key>k</arg_key>", "glm45"),
        ("{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>", "deepseek_v31"),
        ("{{ tools }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", "deepseek_v3"),
        ("{{ tools }}[TOOL_CALLS][", "mistral"),
        ("{{ tools }}[TOOL_CALLS]f[ARGS]{", "mistral_named"),
        ("{{ tools }}<function_calls>", None),
    ],
)
def test_the_template_tells_the_format(template: str, name: str | None) -> None:
    tool_format = detect_format(template)
    assert (tool_format and tool_format.name) == name


@pytest.mark.parametrize(
    ("tool_format", "text", "error"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}', "not closed"),
        (HERMES, '{"name": "f", "arguments": {}}</tool_call>', "without"),
        (HERMES, "<tool_call>{broken</tool_call>", "no JSON"),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', "no name"),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', "'arguments'"),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "'arguments'"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "no JSON"),
        (HERMES, f"<tool_call>{'[' * 9999}</tool_call>", "no JSON"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>', "unexpected text"),
        (LLAMA_JSON, '{"name": "f", "parameters": {', "no JSON"),
        (LLAMA_JSON, "<|python_tag|>f(x=1)", "no JSON"),
        (LLAMA_JSON, '{"name": "f"}', "'parameters'"),
        (PLAIN, "Action: f {", "no JSON"),
        (PLAIN, "Action: f [1]", "'arguments'"),
        (PLAIN, 'Action: {"x": 1}', "not like 'Action: NAME"),
        (PLAIN, "Action: f {} and more", "unexpected text"),
        (PLAIN, "Action: f {}; {}", "more than one"),
        (
            XML,
            "<tool_call>\n<function=f>\n<parameter=x</parameter>\n</function>\n</tool_call>",
            "among the arguments",
        ),
    ],
)
def test_a_malformed_call_is_content_with_an_error(tool_format: ToolFormat, text: str, error: str) -> None:
    parsed = tool_format.parse(text)
    assert (parsed.content, parsed.calls) == (text, ())
    assert error in parsed.error


GOOD = {
    HERMES: '<tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call>',
    PLAIN: 'Action: f {"x": "1"}',
    XML: "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize(
    ("tool_format", "text", "count"),
    [
        (HERMES, "GOOD<tool_call>{</tool_call>", 1),
        (HERMES, '<tool_call>{"na\nGOOD', 1),
        (PLAIN, "GOOD\nAction: g", 1),
        (XML, "GOOD\n<tool_call>\n<function=g>\n<parameter=x>\n1", 1),
        (XML, "GOOD\n<tool_call>\n<function=g>\n</tool_call>\nGOOD", 2),
        (XML, "<tool_call>\n<function=g>\n<parameter=x>\n1\n</tool_call>\nGOOD", 1),
    ],
)
def test_good_calls_beside_a_malformed_one_are_kept(tool_format: ToolFormat, text: str, count: int) -> None:
    parsed = tool_format.parse(text.replace("GOOD", GOOD[tool_format]))
    assert [(call.name, call.arguments) for call in parsed.calls] == [("f", {"x": "1"})] * count
    assert parsed.content == text.replace("GOOD", "").strip()
    assert parsed.error
    echo = "\n".join([parsed.content, *[GOOD[tool_format]] * count])
    assert replace(tool_format.parse(echo), error=parsed.error) == parsed


@pytest.mark.parametrize(
    "value",
    ["a </parameter> b", "</parameter>\n</function>", "x = '<function=g>'", "<tool_call>", "</tool_call>", "\n\n", ""],
)
def test_an_xml_argument_may_have_marks_in_it(value: str) -> None:
    written = GOOD[XML].replace("\n1\n", f"\n{value}\n")
    for text in (written, written.replace("=x>", "=x"), f"{GOOD[XML]}\n{written}"):
        parsed = XML.parse(text)
        assert (parsed.calls[-1].arguments, parsed.error) == ({"x": value}, None)


def test_plain_text_is_plain_text() -> None:
    for tool_format in FORMATS:
        for text in ("", " 4 < 5 ", '{"answer": 42}', "[1, 2]"):
            parsed = tool_format.parse(text)
            assert (parsed.content, parsed.calls, parsed.error) == (text, (), None)


def test_llama_calls_side_by_side_may_have_a_tag_before_them() -> None:
    parsed = LLAMA_JSON.parse(' <|python_tag|>{"name":"f","parameters":{}} ; {"name": "g", "parameters": {"y": "; }"}}')
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
    question = {"role": "user", "content": "hello"}
    (alone, user) = in_plain_text([question], tools)
    assert user == question
    assert "now()\ncalculator(expression: any)\n" in alone["content"]
    (joined, _) = in_plain_text([{"role": "system", "content": "Be brief."}, question], tools)
    assert joined == {"role": "system", "content": f"Be brief.\n\n{alone['content']}"}
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "ab"]
    assert in_plain_text([question, *results, question], None) == [
        question,
        {"role": "user", "content": "Observation: a\nObservation: b"},
        question,
    ]


@pytest.mark.parametrize(
    ("name", "rest", "any_rest"),
    [
        ("hermes", ' {"x": 1}}</tool_call>', 'g", "arguments": {}}</tool_call>'),
        ("qwen3_coder", "<parameter=x>\n1\n</parameter></function></tool_call>", "g></function></tool_call>"),
        ("glm45", "<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>", "g</tool_call>"),
        ("deepseek_v31", '"x": 1}<｜tool▁call▁end｜>', "g<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ("deepseek_v3", '"x": 1}\n```<｜tool▁call▁end｜>', "g\n```json\n{}\n```<｜tool▁call▁end｜>"),
        ("mistral", ' {"x": 1}}]', 'g", "arguments": {}}]'),
        ("mistral_named", '"x": 1}', "g[CALL_ID]123456789[ARGS]{}"),
        ("llama3_json", ' {"x": 1}}', 'g", "parameters": {}}'),
        ("plain_text", '"x": 1}', "g {}"),
    ],
)
def test_a_forced_prefix_is_the_beginning_of_a_call(name: str, rest: str, any_rest: str) -> None:
    tool_format = next(tool_format for tool_format in FORMATS if tool_format.name == name)
    properties = {"x": {"type": "integer"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    (call,) = tool_format.parse(f"{tool_format.forced_prefix('f')}{rest}", tools).calls
    assert (call.name, call.arguments) == ("f", {"x": 1})
    (call,) = tool_format.parse(f"{tool_format.forced_prefix(None)}{any_rest}", tools).calls
    assert (call.name, call.arguments) == ("g", {})


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({}, "12", "12"),
        ({"type": "integer"}, " 12 ", 12),
        ({"type": ["number", "null"]}, "null", None),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "[1]", [1]),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "12", "12"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Node"}, "3", "3"),
    ],
)
def test_texts_of_arguments_get_the_types_of_the_schema(schema: dict, text: str, value: Any) -> None:
    definitions = {"Point": {"type": "object"}, "Node": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "object"}]}}
    parameters = {"properties": {"x": schema}, "$defs": definitions}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    written = f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>"
    (call,) = FORMATS[1].parse(written, tools).calls
    assert call.arguments == {"x": value}


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
    before = ParsedReply("")
    for end in range(len(text) + 1):
        certain = parser.parse(text[:end], is_over=False)
        assert certain.calls == ()
        assert certain.content.startswith(before.content)
        assert certain.reasoning.startswith(before.reasoning)
        before = certain
    assert whole.content.startswith(before.content)
    assert whole.reasoning.startswith(before.reasoning)


def deltas(parser: ReplyParser, *pieces: str) -> list[ParsedReply]:
    """The additions of each piece, and of the end."""
    texts = list(accumulate(pieces))
    parsed = [ParsedReply(""), *(parser.parse(text, is_over=False) for text in texts), parser.parse(texts[-1])]
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
    assert (first.content + second.content, rest) == ("So it is 42.", ParsedReply(""))


@pytest.mark.parametrize(
    ("text", "is_thinking", "reasoning", "content"),
    [
        ("<think>\na\n b\n</think>\n\nc", False, "a\n b", "c"),
        ("<think>\n\n</think>\n\nc", False, "", "c"),
        ("<think>a", False, "a", ""),  # cut
        (" a</think>c", False, "", " a</think>c"),  # vLLM takes any text as reasoning before it has ended
        ("So <think>a</think>", False, "", "So <think>a</think>"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
    ],
)
def test_reasoning(text: str, is_thinking: bool, reasoning: str, content: str) -> None:
    assert ReplyParser(None, (), THINK, is_thinking).parse(text) == ParsedReply(content, reasoning=reasoning)


def test_calls_among_thoughts_are_thoughts() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    parsed = ReplyParser(FORMATS[0], TOOLS, THINK).parse(f"<think>{call}</think>{call}")
    assert parsed == ParsedReply("", (ToolCall("add", {}),), reasoning=call)
