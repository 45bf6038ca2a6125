"""The Messages API through the gateway, by Anthropic's client: how calls end, and conversations that go on."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic

from agl_core.testing.scripts import CallTools, Fail, Raw
from agl_core.types import AttemptKey
from agl_server.testing import Stack

from ..server_aids import HELLO, OVERFLOW, OWN, client_of, closed, forwarded, reply

BASE: dict[str, Any] = {"model": "m", "max_tokens": 100}
GOOD: dict[str, Any] = {**BASE, "messages": HELLO}


async def test_stop_reasons(stack: Stack, claude: AsyncAnthropic) -> None:
    called = OWN["one call"]
    for step, reason in (
        (reply(OWN["text"], "length"), "max_tokens"),
        (reply(OWN["text"], "abort"), "max_tokens"),
        (reply(OWN["text"], "content_filter"), "refusal"),
        (reply(OWN["text"], stop_reason="END"), "stop_sequence"),
        (reply(OWN["text"], stop_reason=151645), "end_turn"),
        (reply(called, "stop"), "tool_use"),
        (reply(called, "length"), "max_tokens"),
        (reply(OWN["text"], "function_call"), "end_turn"),
        (reply({"role": "assistant", "content": None, "refusal": "No."}), "refusal"),
    ):
        stack.upstream.script(step, step)
        message = await claude.messages.create(**GOOD)
        async with claude.messages.stream(**GOOD) as stream:
            final = await stream.get_final_message()
        assert message.stop_reason == final.stop_reason == reason
        assert message.stop_sequence == final.stop_sequence == ("END" if reason == "stop_sequence" else None)


async def test_the_key_is_taken_from_either_header(
    stack: Stack, key: AttemptKey, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("ANTHROPIC_BASE_URL", stack.url(key).removesuffix("/v1")),
        ("ANTHROPIC_AUTH_TOKEN", stack.key(key)),
    ):
        monkeypatch.setenv(name, value)
    await anthropic.AsyncAnthropic().messages.create(**GOOD)
    both = {"x-api-key": "the user's own"}
    await anthropic.AsyncAnthropic().messages.create(**GOOD, extra_headers=both)
    monkeypatch.delenv("ANTHROPIC_AUTH_TOKEN")
    await anthropic.AsyncAnthropic(api_key=stack.key(key)).messages.create(**GOOD)
    for other in ("nonsense", stack.server.worker_key):
        with pytest.raises(anthropic.AuthenticationError, match="is not the right one") as raised:
            await anthropic.AsyncAnthropic(api_key=other).messages.create(**GOOD)
        assert raised.value.type == "authentication_error"
    none = await http.post(f"{stack.url(key)}/messages", json=GOOD)
    assert (none.status_code, "is missing" in none.text) == (401, True)
    assert len(await stack.calls(key)) == 3


async def test_errors_are_anthropics(stack: Stack, key: AttemptKey, claude: AsyncAnthropic) -> None:
    for step, status, kind in (
        (OVERFLOW, 400, "invalid_request_error"),
        (Fail(429), 429, "rate_limit_error"),
        (Fail(500), 502, "api_error"),
        (Raw(b"{}"), 502, "api_error"),
    ):
        stack.upstream.script(step)
        with pytest.raises(anthropic.APIStatusError) as raised:
            await claude.messages.create(**GOOD)
        assert (raised.value.status_code, raised.value.type) == (status, kind)
        assert ("prompt is too long" in str(raised.value)) == (step is OVERFLOW)
    with pytest.raises(anthropic.NotFoundError, match="does not serve GET") as unknown:
        await claude.messages.batches.list()
    assert unknown.value.type == "not_found_error"
    with pytest.raises(anthropic.NotFoundError, match="without it, as Anthropic's"):
        await client_of(stack, key, base_url=f"{stack.url(key)}/v2").messages.create(**GOOD)


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_echo_is_the_upstreams_own_message(stack: Stack, streamed: bool) -> None:
    for name, original in OWN.items():
        key, own = await stack.lease(), dict(original)
        client = client_of(stack, key)
        stack.upstream.script(reply(own))
        if streamed and own.get("tool_calls"):  # A stream does not show whether there is no text or an empty one.
            own["content"] = own["content"] or None
        if streamed:
            async with client.messages.stream(**BASE, messages=HELLO) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await client.messages.create(**BASE, messages=HELLO)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
            for block in message.content
            if block.type == "tool_use"
        ]
        asks: Any = [
            *HELLO,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": results or "go"},
        ]
        await client.messages.create(**BASE, messages=asks)
        tool_messages = [
            {"role": "tool", "tool_call_id": result["tool_use_id"], "content": "done"} for result in results
        ]
        wanted = [*HELLO, own, *(tool_messages or [{"role": "user", "content": "go"}])]
        assert forwarded(stack) == wanted, name
        assert (await stack.calls(key))[-1].request["messages"] == wanted, name


async def test_numbers_that_another_language_writes_otherwise(stack: Stack, claude: AsyncAnthropic) -> None:
    """JavaScript makes 1 of 1.0 and sorts nothing; the reply is recognised all the same."""
    own = OWN["spacing, order, escapes, floats"]
    stack.upstream.script(reply(own))
    await claude.messages.create(**BASE, messages=HELLO)
    block = {"type": "tool_use", "id": "c1", "name": "f", "input": {"b": {}, "a": [100, "é", None, True], "z": 1}}
    echo: Any = [*HELLO, {"role": "assistant", "content": [block]}, *HELLO]
    await claude.messages.create(**BASE, messages=echo)
    assert forwarded(stack)[1] == own
    block["input"] = {"z": 2}
    await claude.messages.create(**BASE, messages=echo)
    assert forwarded(stack)[1]["tool_calls"][0]["function"]["arguments"] == '{"z": 2}'


async def test_what_tools_gave_is_an_tool_result(stack: Stack, key: AttemptKey, claude: AsyncAnthropic) -> None:
    stack.upstream.script(CallTools([("add", {"n": number}) for number in range(6)]))
    message = await claude.messages.create(**BASE, messages=HELLO)
    contents: list[dict[str, Any]] = [
        {"content": "no such city", "is_error": True},
        {"content": [{"type": "text", "text": "it timed"}, {"type": "text", "text": " out"}], "is_error": True},
        {"content": "ValueError: what the file says", "is_error": False},
        {"content": "ValueError: raised"},
        {},
        {"content": "22 °C"},
    ]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": block.id, **content}
        for block, content in zip(message.content, contents, strict=True)
    ]
    answer: Any = {"role": "user", "content": [*results, {"type": "text", "text": "and now?"}]}
    await claude.messages.create(**BASE, messages=[*HELLO, {"role": "assistant", "content": message.content}, answer])
    first, second = (await closed(stack, key)).transitions
    assert [result.status for result in first.tool_results] == ["error", "timeout", "ok", "error", "empty", "ok"]
    assert (first.tool_results[0].tool, first.tool_results[0].error) == ("add", "no such city")
    assert [sent["role"] for sent in second.messages] == ["user", "assistant", *["tool"] * 6, "user"]
    assert second.messages[2]["status"] == "error"
    assert [set(sent) for sent in forwarded(stack)[2:8]] == [{"role", "tool_call_id", "content"}] * 6
    assert forwarded(stack)[-1] == {"role": "user", "content": "and now?"}
