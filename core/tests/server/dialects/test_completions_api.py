"""Legacy completions through the gateway, by the official client and LangChain's."""

from __future__ import annotations

import json
from typing import Any

from openai.types import Completion

from agl_core.testing.scripts import Say
from agl_core.testing.server import Stack
from agl_core.testing.upstream import END_TOKEN, logprob
from agl_core.types import Mode

from ..api_oracles import extras, post_each

GOOD: dict[str, Any] = {"model": "default", "prompt": "Question: 1 + 1?"}
MESSAGES = [{"role": "user", "content": "Question: 1 + 1?"}]


async def test_a_prompt_is_one_user_message(stack: Stack) -> None:
    key = await stack.lease()
    stack.upstream.script(Say("two"))
    completion = await stack.client(key).completions.create(**GOOD, max_tokens=9, temperature=0.3)
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("two", "stop")
    (call,) = await stack.calls(key)
    assert (call.id, call.api) == (completion.id, "completions")
    assert completion.id.startswith("cmpl-")
    assert call.request == {"model": "default", "max_tokens": 9, "temperature": 0.3, "messages": MESSAGES}
    assert call.choices[0].response_ids is not None
    assert call.choices[0].response_ids.tolist() == [*b"two", END_TOKEN]
    assert (call.requested.max_tokens, call.requested.temperature) == (9, 0.3)
    assert stack.upstream.received[0].body["messages"] == MESSAGES


async def test_replies_and_streams_fit_the_schema_and_have_no_extras(stack: Stack) -> None:
    key = await stack.lease()
    stack.upstream.agl = {"version": 3}
    stack.upstream.script(*[Say("ab" * 100)] * 3)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    whole, streamed, bare = await post_each(
        stack,
        f"{stack.url(key)}/completions",
        [{**GOOD, "logprobs": 2, "n": 2}, {**GOOD, **usage, "logprobs": 0}, {**GOOD, "stream": True}],
    )
    completion = Completion.model_validate_json(whole.text)
    assert list(extras(completion)) == []
    first, second = completion.choices
    assert (first.text, second.text) == ("ab" * 100, "ab" * 100 + " (1)")
    assert first.logprobs is not None
    assert first.logprobs.token_logprobs == [logprob(each) for each in [*b"ab" * 100, END_TOKEN]]
    assert first.logprobs.text_offset == list(range(201))
    *data, done = streamed.text.strip().split("\n\n")
    chunks = [Completion.construct(**json.loads(each.removeprefix("data: "))) for each in data]
    assert done == "data: [DONE]"
    assert [found for chunk in chunks for found in extras(chunk)] == []
    *texts, last = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == "ab" * 100
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None, None, None, "stop"]
    carried = [chunk.choices[0].logprobs for chunk in texts if chunk.choices[0].logprobs]
    assert [each.token_logprobs for each in carried] == [first.logprobs.token_logprobs]
    assert last.usage is not None
    assert (last.choices, last.usage.completion_tokens) == ([], 201)
    assert "usage" not in bare.text
    assert '"logprobs":{' not in bare.text


async def test_what_is_asked_is_passed_on(stack: Stack) -> None:
    key = await stack.lease(mode=Mode.EVAL_SAMPLED)
    nothing: dict[str, Any] = {"echo": False, "suffix": "", "best_of": 1}
    await stack.client(key).completions.create(
        model="default",
        prompt=["x"],
        **nothing,
        stop="END",
        user="me",
        presence_penalty=0.5,
        extra_body={"invented": 1},
    )
    body = stack.upstream.received[0].body
    assert (body["stop"], body["user"], body["presence_penalty"], body["invented"]) == ("END", "me", 0.5, 1)
    assert body["messages"] == [{"role": "user", "content": "x"}]
    assert not {"prompt", *nothing} & set(body)
