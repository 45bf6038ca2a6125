"""An echoed reply keeps the ids that were sampled; recorded texts get those that they would have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import CHATML

from agl_chat.conversation import ReplyMemory, token_ids, tokenized
from agl_core.testing import episodes as make
from agl_core.types import FinishReason, PrefixBreak

from .conftest import (
    CALCULATOR,
    CALL,
    USER,
    ScriptedChat,
    ServedModel,
    assert_continues,
    echo,
    result,
)

HELLO = {"role": "user", "content": "hello"}
SPACED = '<tool_call>\n{"arguments":{"expression":"12+30"},  "name":"calculator"}\n</tool_call>'


NEXT = "\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_a_reply_that_would_be_tokenised_otherwise(chat: ScriptedChat) -> None:
    ids = chat.letters("The answer is 42.")
    assert ids[:-1] != chat.encode("The answer is 42.")
    first = chat.ask([USER], ids)
    messages = [USER, echo(first), HELLO]
    second = chat.ask(messages, "x")
    assert_continues(first, second, chat.encode(NEXT))
    assert second["prompt_token_ids"] != chat.ask(messages, "x", session="other")["prompt_token_ids"]
    third = chat.ask([*messages, echo(second), HELLO], "x")
    assert_continues(second, third, chat.encode(NEXT))


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
    first = chat.ask([USER], chat.letters(reply, end), tools=[CALCULATOR])
    second = chat.ask([USER, echo(first), HELLO], "x", tools=[CALCULATOR])
    assert_continues(first, second, chat.encode(tail))


def test_a_reply_with_spaces_that_the_template_trims(llama: ServedModel) -> None:
    chat = ScriptedChat(llama)
    first = chat.ask([USER], chat.letters("  so it is 42 \n"))
    second = chat.ask([USER, echo(first), HELLO], "x")
    tail = (
        "<|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert_continues(first, second, chat.encode(tail))


def test_the_choice_that_is_echoed_is_spliced(chat: ScriptedChat) -> None:
    first = chat.ask([USER], "one", chat.letters("two"), SPACED, SPACED, tools=[CALCULATOR])
    for choice in (1, 3):
        message, after = echo(first, choice), HELLO
        if choice == 3:  # Its client writes the arguments otherwise.
            message["tool_calls"][0]["function"]["arguments"] = '{ "expression" : "12+30" }'
            after = result(message)
        assert_continues(first, chat.ask([USER, message, after], "x", tools=[CALCULATOR]), choice=choice)


def broken(chat: ScriptedChat, messages: list[dict[str, Any]], **fields: Any) -> PrefixBreak | None:
    return chat.ask(messages, "x", **fields)["agl"]["prefix_broken"]


def test_what_cannot_be_spliced_is_tokenised_anew_and_told(chat: ScriptedChat) -> None:
    first = chat.ask([USER], chat.letters("The answer is 42."))
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
    first = old.ask([USER], old.letters("The answer is 42."))
    messages = [USER, echo(first), HELLO]
    second = new.ask(messages, "And now?", moved=True)
    assert second["agl"]["prefix_broken"] == PrefixBreak.SERVER
    assert not broken(new, [HELLO], moved=True), "a conversation that begins"
    assert_continues(second, new.ask([*messages, echo(second), HELLO], "x", moved=True))


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


def test_sessions_are_apart(chat: ScriptedChat) -> None:
    first = chat.ask([USER], chat.letters("The answer is 42."))
    messages = [USER, echo(first), HELLO]
    anew = chat.ask(messages, "x", session="r/1")
    assert anew["prompt_token_ids"] != chat.ask(messages, "x")["prompt_token_ids"]
    assert not anew["agl"]["prefix_broken"]
    assert chat.ask(messages, "x", session=None)["prompt_token_ids"] == anew["prompt_token_ids"]


@pytest.mark.parametrize("bound", [{"max_sessions": 2}, {"max_bytes": 3000}])
def test_sessions_are_bounded(chat: ScriptedChat, bound: dict[str, int]) -> None:
    sessions = ReplyMemory(chat.served.text, **bound)
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
    sessions, reply = ReplyMemory(chat.served.text, max_bytes=5000), {"role": "assistant", "content": "42"}
    asked = [[{"role": "user", "content": f"{number} + 1?"}] for number in range(9)]
    for messages in asked:
        prompt = sessions.prompt("all", messages)
        sessions.record("all", messages, prompt, [(reply, np.arange(8, 208, dtype=np.int32))])
    known = [207 in sessions.prompt("all", [*messages, reply, HELLO]).ids.tolist() for messages in asked]
    assert known == sorted(known)
    assert 2 < sum(known) < 6


def test_a_text_has_the_ids_that_were_sampled_for_it(qwen: ServedModel) -> None:
    chat = ScriptedChat(qwen)
    body = chat.ask([USER], "The answer is 42.")

    prompt, response = token_ids(chat.served.text, [USER], [], echo(body))

    assert prompt.tolist() == body["prompt_token_ids"]
    assert response.tolist() == body["choices"][0]["token_ids"]


def test_tool_calls_and_what_follows_them(qwen: ServedModel) -> None:
    chat = ScriptedChat(qwen)
    first = chat.ask([USER], CALL, tools=[CALCULATOR])
    following = [USER, echo(first), result(echo(first))]
    then = chat.ask(following, "The answer is 42.", tools=[CALCULATOR])

    for messages, body in (([USER], first), (following, then)):
        prompt, response = token_ids(chat.served.text, messages, [CALCULATOR], echo(body))

        decoded = qwen.tokenizer.decode
        assert decoded(prompt) == decoded(body["prompt_token_ids"])
        assert decoded(response) == decoded(body["choices"][0]["token_ids"])


def test_a_reply_that_was_cut_short_has_no_end(qwen: ServedModel) -> None:
    chat = ScriptedChat(qwen)
    reply = {"role": "assistant", "content": "The answer is"}

    choices = [make.choice(n, message=reply, finish_reason=reason) for n, reason in enumerate(FinishReason)]
    call = tokenized(chat.served.text, make.call(0, *choices, request={"messages": [USER]}))

    ids = {choice.finish_reason: choice.response_ids.tolist() for choice in call.choices}
    assert ids[FinishReason.STOP] == [*ids[FinishReason.LENGTH], qwen.tokenizer.eos_token_id]
    assert call.prompt_ids.tolist() == token_ids(chat.served.text, [USER], [], reply)[0].tolist()
    assert {choice.logprobs for choice in call.choices} == {None}, "those of another sampling"


@pytest.mark.parametrize(
    ("messages", "reply"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {"role": "assistant"}),
        ([USER], {"role": "assistant", "content": "half a pair: \ud800"}),
        ([USER], {"role": "assistant", "tool_calls": ["none"]}),
        ([], {"role": "critic", "content": "x"}),
    ],
)
def test_what_no_template_can_write_has_no_ids(qwen: ServedModel, messages: Any, reply: dict[str, Any]) -> None:
    assert token_ids(ScriptedChat(qwen).served.text, messages, [], reply) == (None, None)
