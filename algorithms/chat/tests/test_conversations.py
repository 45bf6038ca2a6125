"""Tool-call formats; an echoed reply keeps the ids that were sampled; recorded texts get those that they would have."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CHATML, LLAMA

from agl_chat.conversation import Sessions, tokenized
from agl_chat.formats import ToolFormat
from agl_chat.parsing import FORMATS, detect_format
from agl_chat.plain_text import in_plain_text
from agl_core.types import PrefixBreak, RecordedReply

from .conftest import CALCULATOR, ScriptedChat, ServedModel, parsed, with_template

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
        (HERMES, f"<tool_call>{'[' * 9999}</tool_call>", "no JSON"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>', "unexpected text"),
        (LLAMA_JSON, '{"name": "f", "parameters": {', "no JSON"),
        (LLAMA_JSON, "<|python_tag|>f(x=1)", "no JSON"),
        (LLAMA_JSON, '{"name": "f"}', "'parameters'"),
        (PLAIN, "Action: f", "no JSON"),
        (PLAIN, "Action: f {", "no JSON"),
        (PLAIN, "Action: f [1]", "'arguments'"),
        (PLAIN, 'Action: {"x": 1}', "a tool's name"),
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
    assert parsed.error is not None
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


USER = {"role": "user", "content": "What is 12 plus 30?"}
HELLO = {"role": "user", "content": "hello"}
SPACED = '<tool_call>\n{"arguments":{"expression":"12+30"},  "name":"calculator"}\n</tool_call>'


def letters(chat: ScriptedChat, text: str) -> list[int]:
    """A text one character at a time, as no tokenizer would write it."""
    return [token for character in text for token in chat.encode(character)]


def echo(body: dict[str, Any], choice: int = 0) -> dict[str, Any]:
    return {key: value for key, value in body["choices"][choice]["message"].items() if key != "refusal"}


def result(message: dict[str, Any], text: str = "42") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


def assert_spliced(first: dict[str, Any], second: dict[str, Any], tail: list[int], choice: int = 0) -> None:
    assert not second["agl"]["prefix_broken"]
    sampled = first["choices"][choice]["token_ids"]
    assert second["prompt_token_ids"] == first["prompt_token_ids"] + sampled + tail


@pytest.fixture
def chat(qwen: ServedModel) -> ScriptedChat:
    return ScriptedChat(qwen)


NEXT = "\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_a_reply_that_would_be_tokenised_otherwise(chat: ScriptedChat) -> None:
    ids = [*letters(chat, "The answer is 42."), chat.model.tokenizer.eos_token_id]
    assert ids[:-1] != chat.encode("The answer is 42.")
    first = chat.ask([USER], ids)
    messages = [USER, echo(first), HELLO]
    second = chat.ask(messages, "x")
    assert_spliced(first, second, chat.encode(NEXT))
    assert second["prompt_token_ids"] != chat.ask(messages, "x", session="other")["prompt_token_ids"]
    third = chat.ask([*messages, echo(second), HELLO], "x")
    assert_spliced(second, third, chat.encode(NEXT))


def test_tool_calls_that_would_be_written_otherwise(chat: ScriptedChat) -> None:
    first = chat.ask([USER], SPACED, tools=[CALCULATOR])
    message = echo(first)
    message["tool_calls"][0]["function"]["arguments"] = '{ "expression" : "12+30" }'
    second = chat.ask([USER, message, result(message)], "The answer is 42.", tools=[CALCULATOR])
    tail = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert_spliced(first, second, chat.encode(tail))


@pytest.mark.parametrize(
    ("reply", "end", "tail"),
    [
        ('<tool_call>{"name": broken', "<|im_end|>", NEXT),  # a malformed call, which is spliced as the text it is
        ("The ans", "", "<|im_end|>" + NEXT),  # cut by length, it gets the end that the template writes
        ("hello", "<|endoftext|>", NEXT),
    ],
    ids=["malformed call", "cut by length", "another end token"],
)
def test_a_reply_is_spliced_as_it_was_sampled(chat: ScriptedChat, reply: str, end: str, tail: str) -> None:
    first = chat.ask([USER], [*letters(chat, reply), *chat.encode(end)], tools=[CALCULATOR])
    second = chat.ask([USER, echo(first), HELLO], "x", tools=[CALCULATOR])
    assert_spliced(first, second, chat.encode(tail))


def test_a_reply_with_spaces_that_the_template_trims(llama: ServedModel) -> None:
    chat = ScriptedChat(llama)
    first = chat.ask([USER], [*letters(chat, "  so it is 42 \n"), llama.tokenizer.eos_token_id])
    second = chat.ask([USER, echo(first), HELLO], "x")
    tail = (
        "<|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert_spliced(first, second, chat.encode(tail))


def test_the_choice_that_is_echoed_is_spliced(chat: ScriptedChat) -> None:
    eos = chat.model.tokenizer.eos_token_id
    first = chat.ask([USER], "one", [*letters(chat, "two"), eos], SPACED, SPACED, tools=[CALCULATOR])
    for choice in (1, 3):
        message = echo(first, choice)
        after = result(message) if choice == 3 else HELLO
        second = chat.ask([USER, message, after], "x", tools=[CALCULATOR])
        assert not second["agl"]["prefix_broken"]
        prefix = first["prompt_token_ids"] + first["choices"][choice]["token_ids"]
        assert second["prompt_token_ids"][: len(prefix)] == prefix


def test_agents_that_interleave_in_one_rollout(chat: ScriptedChat) -> None:
    system = {"role": "system", "content": "You are a math agent."}
    eos = chat.model.tokenizer.eos_token_id
    one = chat.ask([USER], [*letters(chat, "one"), eos])
    two = chat.ask([system, USER], [*letters(chat, "two"), eos])
    assert_spliced(one, chat.ask([USER, echo(one), HELLO], "x"), chat.encode(NEXT))
    assert_spliced(two, chat.ask([system, USER, echo(two), HELLO], "x"), chat.encode(NEXT))


def broken(chat: ScriptedChat, messages: list[dict[str, Any]], **fields: Any) -> PrefixBreak | None:
    cause: PrefixBreak | None = chat.ask(messages, "x", **fields)["agl"]["prefix_broken"]
    return cause


def test_what_cannot_be_spliced_is_tokenised_anew_and_told(chat: ScriptedChat) -> None:
    first = chat.ask([USER], [*letters(chat, "The answer is 42."), chat.model.tokenizer.eos_token_id])
    edited = [USER, {"role": "assistant", "content": "The answer is 43."}, HELLO]
    moved = [{"role": "user", "content": "Something else?"}, echo(first), HELLO]
    for messages, cause in ((edited, PrefixBreak.EDITED), (moved, PrefixBreak.MOVED)):
        body = chat.ask(messages, "x")
        assert body["agl"]["prefix_broken"] == cause
        fresh = chat.ask(messages, "x", session=f"fresh{id(messages)}")
        assert body["prompt_token_ids"] == fresh["prompt_token_ids"]
        assert not fresh["agl"]["prefix_broken"]
    assert not broken(chat, [{"role": "user", "content": "new"}, {"role": "assistant", "content": "example"}, HELLO])


def test_a_rollout_that_moved_is_tokenised_anew_once(qwen: ServedModel) -> None:
    old, new = ScriptedChat(qwen), ScriptedChat(qwen)
    first = old.ask([USER], [*letters(old, "The answer is 42."), old.model.tokenizer.eos_token_id])
    messages = [USER, echo(first), HELLO]
    second = new.ask(messages, "And now?", moved=True)
    assert second["agl"]["prefix_broken"] == PrefixBreak.SERVER
    assert not broken(new, [HELLO], moved=True), "a conversation that begins"
    third = new.ask([*messages, echo(second), HELLO], "x", moved=True)
    assert not third["agl"]["prefix_broken"]
    recorded = [*second["prompt_token_ids"], *second["choices"][0]["token_ids"]]
    assert third["prompt_token_ids"][: len(recorded)] == recorded


def test_a_template_that_rewrites_history_breaks(qwen: ServedModel) -> None:
    tokenizer = type(qwen.tokenizer)(tokenizer_object=qwen.tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML.replace("(message.content or '')", "(message.content or '') | upper")
    chat = ScriptedChat(replace(qwen, tokenizer=tokenizer))
    for reply, cause in (("the answer", PrefixBreak.TEMPLATE), (chat.encode("the ans"), PrefixBreak.CUT)):
        first = chat.ask([USER], reply)
        assert broken(chat, [USER, echo(first), HELLO]) == cause


def test_a_request_with_other_tools_or_variables_breaks_by_itself(chat: ScriptedChat) -> None:
    """A tool loop, then an answer without tools, then a turn with tools again."""
    first = chat.ask([USER], SPACED, tools=[CALCULATOR])
    messages = [USER, echo(first), result(echo(first))]
    answer = chat.ask(messages, "42", response_format={"type": "json_object"})
    assert answer["agl"]["prefix_broken"] == PrefixBreak.REQUEST
    messages += [echo(answer), HELLO]
    assert broken(chat, messages, tools=[CALCULATOR]) == PrefixBreak.REQUEST
    assert not broken(chat, messages)
    assert not broken(chat, messages[:3], tools=[CALCULATOR], response_format={"type": "json_object"})


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
FIRST = "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
RAISES = "{{ raise_exception('no') if "
SYSTEM_TEMPLATES = {
    "any": f"{{% for m in messages %}}{TURN}{{% endfor %}}{BEGIN}",
    "raises, as Qwen3.5": (
        f"{{% for m in messages %}}{RAISES}m.role == 'system' and not loop.first }}}}{TURN}{{% endfor %}}{BEGIN}"
    ),
    "drops, as gpt-oss": CHATML,
    "alternates, as Gemma 3": (
        f"{FIRST}{{{{ messages[0].content if rest != messages }}}}{{% for m in rest %}}{RAISES}(m.role == 'user') != "
        f"(loop.index0 % 2 == 0) }}}}{TURN}{{% endfor %}}{BEGIN}"
    ),
    "knows none": f"{{% for m in messages if m.role != 'system' %}}{TURN}{{% endfor %}}{BEGIN}",
}


@pytest.mark.parametrize("name", SYSTEM_TEMPLATES)
def test_no_text_of_a_system_message_is_lost(qwen: ServedModel, name: str) -> None:
    chat = ScriptedChat(with_template(qwen, SYSTEM_TEMPLATES[name]))
    kept = {"any": 2, "knows none": 0}.get(name, 1)
    assert chat.served.text.kept_systems == kept
    one, two, three, four, five = ({"role": "system", "content": f"<rule {number}>"} for number in range(5))
    for messages in ([one, two, USER], [one, USER, two], [USER, one], [one]):
        ids = chat.ask(messages, "x", session=None)["prompt_token_ids"]
        shown = chat.model.tokenizer.decode(ids)
        places = [shown.find(message["content"]) for message in messages]
        assert sorted(places) == places
        assert places[0] >= 0
        exchange = chat.served.begin(parsed({"model": "m", "messages": messages}), None)
        folded = [f"messages.{at}.role" for at, m in enumerate(messages) if m["role"] == "system" and at >= kept]
        assert exchange.ignored == (() if kept == 2 else tuple(folded))
    first = chat.ask([one, USER, two], letters(chat, "so be it") + chat.encode("<|im_end|>"))
    messages = [one, USER, two, echo(first), three, four, HELLO]
    second = chat.ask(messages, "x")
    third = chat.ask([*messages, echo(second), five], "x")
    for before, after in ((first, second), (second, third)):
        recorded = [*before["prompt_token_ids"], *before["choices"][0]["token_ids"]]
        assert after["prompt_token_ids"][: len(recorded)] == recorded


def test_sessions_are_apart(chat: ScriptedChat) -> None:
    first = chat.ask([USER], [*letters(chat, "The answer is 42."), chat.model.tokenizer.eos_token_id])
    messages = [USER, echo(first), HELLO]
    anew = chat.ask(messages, "x", session="r/1")
    assert anew["prompt_token_ids"] != chat.ask(messages, "x")["prompt_token_ids"]
    assert not anew["agl"]["prefix_broken"]
    assert chat.ask(messages, "x", session=None)["prompt_token_ids"] == anew["prompt_token_ids"]


@pytest.mark.parametrize("bound", [{"max_sessions": 2}, {"max_bytes": 3000}])
def test_sessions_are_bounded(chat: ScriptedChat, bound: dict[str, int]) -> None:
    sessions = Sessions(chat.served.text, **bound)
    messages = [HELLO]
    reply = {"role": "assistant", "content": "42"}

    def ask(key: str) -> bool:
        again = sessions.prompt(key, [*messages, reply, *messages])
        prompt = sessions.prompt(key, messages)
        sessions.record(key, messages, prompt, [(reply, np.arange(8, 208, dtype=np.int32))])
        return 207 in again.ids.tolist()

    for key in ("a", "b", "c", "d"):
        assert not ask(key)
    assert ask("d")
    assert not ask("a")


def test_one_session_that_never_ends_forgets_its_oldest_calls(chat: ScriptedChat) -> None:
    """All clients of served policies are one session."""
    sessions, reply = Sessions(chat.served.text, max_bytes=5000), {"role": "assistant", "content": "42"}
    asked = [[{"role": "user", "content": f"{number} + 1?"}] for number in range(9)]
    for messages in asked:
        prompt = sessions.prompt("all", messages)
        sessions.record("all", messages, prompt, [(reply, np.arange(8, 208, dtype=np.int32))])
    known = [207 in sessions.prompt("all", [*messages, reply, HELLO]).ids.tolist() for messages in asked]
    assert known == sorted(known)
    assert 2 < sum(known) < 6


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+30"}}\n</tool_call>'


def message_of(body: dict[str, Any]) -> dict[str, Any]:
    """The reply as a client keeps it."""
    return {key: value for key, value in body["choices"][0]["message"].items() if value is not None}


def test_a_text_has_the_ids_that_were_sampled_for_it(qwen: ServedModel) -> None:
    chat = ScriptedChat(qwen)
    body = chat.ask([USER], "The answer is 42.")

    tokens = tokenized(chat.served.text, RecordedReply([USER], [], message_of(body)))

    assert tokens is not None
    assert tokens.prompt_ids.tolist() == body["prompt_token_ids"]
    assert tokens.response_ids.tolist() == body["choices"][0]["token_ids"]


def test_tool_calls_and_what_follows_them(qwen: ServedModel) -> None:
    chat = ScriptedChat(qwen)
    first = chat.ask([USER], CALL, tools=[CALCULATOR])
    called = message_of(first)["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": called["id"], "content": "42"}
    then = chat.ask([USER, message_of(first), result], "The answer is 42.", tools=[CALCULATOR])

    for messages, body in (([USER], first), ([USER, message_of(first), result], then)):
        tokens = tokenized(chat.served.text, RecordedReply(messages, [CALCULATOR], message_of(body)))

        assert tokens is not None
        decoded = qwen.tokenizer.decode
        assert decoded(tokens.prompt_ids) == decoded(body["prompt_token_ids"])
        assert decoded(tokens.response_ids) == decoded(body["choices"][0]["token_ids"])


def test_a_reply_that_was_cut_short_has_no_end(qwen: ServedModel) -> None:
    chat = ScriptedChat(qwen)
    reply = {"role": "assistant", "content": "The answer is"}

    whole, cut = (tokenized(chat.served.text, RecordedReply([USER], [], reply, complete)) for complete in (True, False))

    assert whole is not None
    assert cut is not None
    assert whole.response_ids.tolist() == [*cut.response_ids.tolist(), qwen.tokenizer.eos_token_id]


@pytest.mark.parametrize(
    "reply",
    [
        RecordedReply(
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], [], {"role": "assistant"}
        ),
        RecordedReply([USER], [], {"role": "assistant", "content": "half a pair: \ud800"}),
        RecordedReply([USER], [], {"role": "assistant", "tool_calls": ["none"]}),
        RecordedReply([], [], {"role": "critic", "content": "x"}),
    ],
)
def test_what_no_template_can_write_has_no_ids(qwen: ServedModel, reply: RecordedReply) -> None:
    assert tokenized(ScriptedChat(qwen).served.text, reply) is None
