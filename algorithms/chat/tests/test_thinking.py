"""Reasoning in replies and their echoes, and what else templates of a family want of messages."""

from __future__ import annotations

import pytest
from tiny_tokenizers import make_tokenizer

from .conftest import CALCULATOR, CALL, USER, ScriptedChat, ServedModel, assert_continues, echo, result

DROPS_EARLIER_THOUGHTS = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- set question = namespace(at=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set question.at = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.index0 > question.at %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As Qwen3 does."""
OPENS = DROPS_EARLIER_THOUGHTS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
"""Its prompt begins the reasoning, as those of DeepSeek R1 and Qwen3's thinking models do."""


def model_of(template: str) -> ScriptedChat:
    tokenizer = make_tokenizer("qwen2", template)
    return ScriptedChat(ServedModel(tokenizer, frozenset([tokenizer.eos_token_id])))


def test_thoughts_that_a_client_drops_are_in_the_prompt_as_long_as_the_template_shows_them() -> None:
    chat = model_of(DROPS_EARLIER_THOUGHTS)
    thoughts = f"<think>\n12 and  30.\n</think>\n\n{CALL}"
    first = chat.ask([USER], chat.letters(thoughts), tools=[CALCULATOR])
    message = first["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("12 and  30.", None)
    assert len(message["tool_calls"]) == 1

    messages = [USER, echo(first), result(message)]
    second = chat.ask(messages, "It is 42.", tools=[CALCULATOR])
    assert_continues(first, second)

    third = chat.ask([*messages, echo(second), USER], "Again 42.", tools=[CALCULATOR])
    assert third["agl"]["prefix_broken"]
    assert "<think>" not in chat.model.tokenizer.decode(third["prompt_token_ids"])


def test_thoughts_that_were_cut_get_the_end_that_the_template_writes() -> None:
    chat = model_of(DROPS_EARLIER_THOUGHTS)
    first = chat.ask([USER], chat.letters("<think>\n12 and", end=""))
    assert first["choices"][0]["message"] == {
        "role": "assistant", "content": "", "refusal": None, "reasoning_content": "12 and"
    }  # fmt: skip
    second = chat.ask([USER, echo(first), {"role": "system", "content": "Go on."}], "42")
    tail = "\n</think>\n\n<|im_end|>\n<|im_start|>system\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    assert_continues(first, second, chat.encode(tail))


def test_thoughts_that_the_prompt_begins() -> None:
    chat = model_of(OPENS)
    (choice,) = chat.ask([USER], f"12 and 30.\n</think>\n\n{CALL}", tools=[CALCULATOR])["choices"]
    assert choice["message"]["reasoning_content"] == "12 and 30."
    assert choice["finish_reason"] == "tool_calls"
    rest = ' {"expression": "1"}}\n</tool_call>'
    (choice,) = chat.ask([USER], rest, tools=[CALCULATOR], tool_choice="required")["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert "reasoning_content" not in choice["message"]


MARKS_ROLES = """\
{%- for m in messages %}<|im_start|>{{ m.role + ' ' + m.content }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant {% endif %}"""
"""As GLM's: what ends a reply is the mark of what follows it."""


@pytest.mark.parametrize(
    ("end", "tail"),
    [("<|im_start|>", "user Again?"), ("<|endoftext|>", "<|im_start|>user Again?"), ("", "<|im_start|>user Again?")],
)
def test_the_mark_of_what_follows_stands_once_after_a_reply(end: str, tail: str) -> None:
    tokenizer = make_tokenizer("qwen2", MARKS_ROLES)
    ends = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|endoftext|>"])
    chat = ScriptedChat(ServedModel(tokenizer, frozenset(ends)))
    first = chat.ask([USER], chat.letters("It is 42.", end))
    second = chat.ask([USER, echo(first), {"role": "user", "content": "Again?"}], "42")
    assert_continues(first, second, chat.encode(f"{tail}<|im_start|>assistant "))


MISTRAL = """\
{%- for m in messages %}{% if m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{%- if m.tool_call_id != messages[loop.index0 - 1].tool_calls[0].id %}{{ raise_exception('another id') }}{% endif %}
{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}{{ call.function | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}]<|im_end|>
{%- else %}[INST]{{ m.content }}{{ tools | tojson if tools and loop.first }}[/INST]{% endif %}{% endfor %}"""
ADDS_ARGUMENTS = """\
{%- for m in messages %}{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for call in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' + call.function.arguments }}
{{- '\n```<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜><|im_end|>' }}
{%- else %}{{ m.role + ': ' + m.content }}{{ tools | tojson if tools and loop.first }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "reply"),
    [
        (MISTRAL, '[TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "1"}}]'),
        (
            ADDS_ARGUMENTS,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n"
            '{"expression": "1"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
    ],
    ids=["ids of nine characters", "arguments as text"],
)
def test_messages_are_as_the_template_wants_them(template: str, reply: str) -> None:
    chat = model_of(template)
    first = chat.ask([USER], reply, tools=[CALCULATOR])
    (call,) = first["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "calculator", "arguments": '{"expression": "1"}'}
    second = chat.ask([USER, echo(first), result(echo(first))], "It is 42.", tools=[CALCULATOR])
    assert_continues(first, second)
