"""Recorded texts become the tokens that the engine's own chat would have had for them."""

from __future__ import annotations

from typing import Any

import pytest

from agl_core.types import RecordedReply
from agl_torch.conversation import tokenized

from .conftest import CALCULATOR, Loaded, ScriptedChat

USER = {"role": "user", "content": "What is 12 plus 30?"}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+30"}}\n</tool_call>'


def said(body: dict[str, Any]) -> dict[str, Any]:
    """The reply as a client keeps it."""
    return {key: value for key, value in body["choices"][0]["message"].items() if value is not None}


def test_a_text_has_the_ids_that_were_sampled_for_it(qwen: Loaded) -> None:
    chat = ScriptedChat(qwen)
    asked = chat.ask([USER], "The answer is 42.")

    made = tokenized(chat.served.text, RecordedReply([USER], [], said(asked)))

    assert made is not None
    assert made.prompt_ids.tolist() == asked["prompt_token_ids"]
    assert made.response_ids.tolist() == asked["choices"][0]["token_ids"]


def test_tool_calls_and_what_follows_them(qwen: Loaded) -> None:
    chat = ScriptedChat(qwen)
    first = chat.ask([USER], CALL, tools=[CALCULATOR])
    called = said(first)["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": called["id"], "content": "42"}
    then = chat.ask([USER, said(first), result], "The answer is 42.", tools=[CALCULATOR])

    for messages, body in (([USER], first), ([USER, said(first), result], then)):
        made = tokenized(chat.served.text, RecordedReply(messages, [CALCULATOR], said(body)))

        assert made is not None
        decoded = qwen.tokenizer.decode
        assert decoded(made.prompt_ids) == decoded(body["prompt_token_ids"])
        assert decoded(made.response_ids) == decoded(body["choices"][0]["token_ids"])


def test_a_reply_that_was_cut_short_has_no_end(qwen: Loaded) -> None:
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
def test_what_no_template_can_write_has_no_ids(qwen: Loaded, reply: RecordedReply) -> None:
    assert tokenized(ScriptedChat(qwen).served.text, reply) is None
