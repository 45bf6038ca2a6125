"""An echoed reply keeps the ids that were sampled, however the conversation would be tokenised anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agl_torch.conversation import Sessions

from .conftest import CALCULATOR, CHATML, Loaded, ScriptedChat

USER = {"role": "user", "content": "What is 12 plus 30?"}
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
def chat(qwen: Loaded) -> ScriptedChat:
    return ScriptedChat(qwen)


NEXT = "\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_a_reply_that_would_be_tokenised_otherwise(chat: ScriptedChat) -> None:
    ids = [*letters(chat, "The answer is 42."), chat.loaded.tokenizer.eos_token_id]
    assert ids[:-1] != chat.encode("The answer is 42.")
    first = chat.ask([USER], ids)
    messages = [USER, echo(first), {"role": "user", "content": "hello"}]
    second = chat.ask(messages, "x")
    assert_spliced(first, second, chat.encode(NEXT))
    assert second["prompt_token_ids"] != chat.ask(messages, "x", session="other")["prompt_token_ids"]
    third = chat.ask([*messages, echo(second), {"role": "user", "content": "hello"}], "x")
    assert_spliced(second, third, chat.encode(NEXT))


def test_tool_calls_that_would_be_written_otherwise(chat: ScriptedChat) -> None:
    first = chat.ask([USER], SPACED, tools=[CALCULATOR])
    message = echo(first)
    message["tool_calls"][0]["function"]["arguments"] = '{ "expression" : "12+30" }'
    second = chat.ask([USER, message, result(message)], "The answer is 42.", tools=[CALCULATOR])
    tail = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert_spliced(first, second, chat.encode(tail))


def test_a_malformed_call_is_spliced_as_the_text_it_is(chat: ScriptedChat) -> None:
    first = chat.ask([USER], '<tool_call>{"name": broken', tools=[CALCULATOR])
    second = chat.ask([USER, echo(first), {"role": "user", "content": "hello"}], "x", tools=[CALCULATOR])
    assert_spliced(first, second, chat.encode(NEXT))


def test_a_reply_cut_by_length_gets_the_end_that_the_template_writes(chat: ScriptedChat) -> None:
    first = chat.ask([USER], letters(chat, "The ans"))
    second = chat.ask([USER, echo(first), {"role": "user", "content": "hello"}], "x")
    assert_spliced(first, second, chat.encode("<|im_end|>" + NEXT))


def test_a_reply_with_another_end_token(chat: ScriptedChat) -> None:
    other = chat.loaded.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    first = chat.ask([USER], [*letters(chat, "hello"), other])
    second = chat.ask([USER, echo(first), {"role": "user", "content": "hello"}], "x")
    assert_spliced(first, second, chat.encode(NEXT))


def test_a_reply_with_spaces_that_the_template_trims(llama: Loaded) -> None:
    chat = ScriptedChat(llama)
    first = chat.ask([USER], [*letters(chat, "  so it is 42 \n"), llama.tokenizer.eos_token_id])
    second = chat.ask([USER, echo(first), {"role": "user", "content": "hello"}], "x")
    tail = (
        "<|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert_spliced(first, second, chat.encode(tail))


def test_the_choice_that_is_echoed_is_spliced(chat: ScriptedChat) -> None:
    eos = chat.loaded.tokenizer.eos_token_id
    first = chat.ask([USER], "one", [*letters(chat, "two"), eos], SPACED, SPACED, tools=[CALCULATOR])
    for choice in (1, 3):
        message = echo(first, choice)
        after = result(message) if choice == 3 else {"role": "user", "content": "hello"}
        second = chat.ask([USER, message, after], "x", tools=[CALCULATOR])
        assert not second["agl"]["prefix_broken"]
        prefix = first["prompt_token_ids"] + first["choices"][choice]["token_ids"]
        assert second["prompt_token_ids"][: len(prefix)] == prefix


def test_agents_that_interleave_in_one_rollout(chat: ScriptedChat) -> None:
    system = {"role": "system", "content": "You are a math agent."}
    eos = chat.loaded.tokenizer.eos_token_id
    one = chat.ask([USER], [*letters(chat, "one"), eos])
    two = chat.ask([system, USER], [*letters(chat, "two"), eos])
    hello = {"role": "user", "content": "hello"}
    assert_spliced(one, chat.ask([USER, echo(one), hello], "x"), chat.encode(NEXT))
    assert_spliced(two, chat.ask([system, USER, echo(two), hello], "x"), chat.encode(NEXT))


def broken(chat: ScriptedChat, messages: list[dict[str, Any]], **fields: Any) -> bool:
    flag: bool = chat.ask(messages, "x", **fields)["agl"]["prefix_broken"]
    return flag


def test_what_cannot_be_spliced_is_tokenised_anew_and_told(chat: ScriptedChat) -> None:
    first = chat.ask([USER], [*letters(chat, "The answer is 42."), chat.loaded.tokenizer.eos_token_id])
    hello = {"role": "user", "content": "hello"}
    edited = [USER, {"role": "assistant", "content": "The answer is 43."}, hello]
    moved = [{"role": "user", "content": "Something else?"}, echo(first), hello]
    for messages in (edited, moved):
        body = chat.ask(messages, "x")
        assert body["agl"]["prefix_broken"]
        fresh = chat.ask(messages, "x", session=f"fresh{id(messages)}")
        assert body["prompt_token_ids"] == fresh["prompt_token_ids"]
        assert not fresh["agl"]["prefix_broken"]
    assert not broken(chat, [{"role": "user", "content": "new"}, {"role": "assistant", "content": "example"}, hello])


def test_a_template_that_rewrites_history_breaks(qwen: Loaded) -> None:
    tokenizer = type(qwen.tokenizer)(tokenizer_object=qwen.tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML.replace("(message.content or '')", "(message.content or '') | upper")
    chat = ScriptedChat(replace(qwen, tokenizer=tokenizer))
    first = chat.ask([USER], "the answer")
    assert broken(chat, [USER, echo(first), {"role": "user", "content": "hello"}])


def test_sessions_are_apart(chat: ScriptedChat) -> None:
    first = chat.ask([USER], [*letters(chat, "The answer is 42."), chat.loaded.tokenizer.eos_token_id])
    messages = [USER, echo(first), {"role": "user", "content": "hello"}]
    anew = chat.ask(messages, "x", session="r/1")
    assert anew["prompt_token_ids"] != chat.ask(messages, "x")["prompt_token_ids"]
    assert not anew["agl"]["prefix_broken"]
    assert chat.ask(messages, "x", session=None)["prompt_token_ids"] == anew["prompt_token_ids"]


@pytest.mark.parametrize("bound", [{"max_sessions": 2}, {"max_bytes": 3000}])
def test_sessions_are_bounded(chat: ScriptedChat, bound: dict[str, int]) -> None:
    sessions = Sessions(chat.served.text, **bound)
    messages = [{"role": "user", "content": "hello"}]
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
