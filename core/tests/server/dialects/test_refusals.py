"""Requests that cannot be read, or ask for what is not here: 400 in the API's own shape, and no call."""

from __future__ import annotations

from typing import Any

import pytest

from agl_core.testing.server import Stack

from ..api_oracles import post_each
from ..posting import HELLO, SMALLEST


def blocks(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [content]}, *HELLO]}


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


REFUSED: dict[str, list[dict[str, Any]]] = {
    "chat/completions": [
        {"messages": "hello"},
        {"messages": []},
        {"messages": ["hello"]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "assistant", "tool_calls": "x"}]},
        {"tools": [3]},
        {"logprobs": 3},
        {"top_logprobs": 2},
        {"prompt_logprobs": 1, "stream": True},
    ],
    "completions": [
        {"prompt": None},
        {"prompt": []},
        {"prompt": ["a", "b"]},
        {"prompt": [1, 2, 3]},
        {"echo": True},
        {"suffix": "x"},
        {"best_of": 3},
        {"messages": HELLO},
        {"logprobs": 6},
    ],
    "responses": [
        {"input": None},
        {"input": []},
        {"input": ["x"]},
        item(),
        item(type="web_search_call", id="ws_1"),
        item(type="item_reference", id="msg_1"),
        item(type="item_reference", id=f"fc_{32 * '0'}_0"),
        item(role="user"),
        item(role="user", content=3),
        item(role="user", content=[{"type": "input_text"}]),
        item(role="user", content=[{"type": "input_image", "file_id": "x"}]),
        item(type="function_call", name="f", arguments="{}"),
        item(type="function_call_output", call_id="c"),
        {"instructions": 3},
        {"previous_response_id": "resp_unknown"},
        {"tools": [{"name": "f"}]},
        {"text": {"format": "json"}},
        {"include": ["file_search_call.results"]},
        {"background": True},
        {"conversation": "c"},
        {"n": 2},
    ],
    "messages": [
        {"messages": "hello"},
        {"messages": []},
        {"messages": [{"role": "developer", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [*HELLO, {"role": "assistant", "content": "I"}]},
        blocks("x"),
        blocks({"type": "text"}),
        blocks({"type": "document", "source": {"type": "url", "url": "x"}}),
        blocks({"type": "image", "source": {"type": "base64", "data": "x"}}),
        blocks({"type": "tool_result", "content": "x"}),
        blocks({"type": "server_tool_use"}, "assistant"),
        blocks({"type": "tool_use", "name": "f", "input": {}}, "assistant"),
        {"system": 3},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "f"}]},
        {"tool_choice": {"type": "sometimes"}},
        {"output_config": {"format": {"type": "xml"}}},
        {"container": "x"},
        {"thread": {"type": "create"}},
        {"stop": ["x"]},
    ],
}
EVERYWHERE: list[dict[str, Any]] = [
    {"model": 3},
    {"temperature": 3},
    {"top_p": "x"},
    {"max_tokens": 0},
    {"seed": True},
    {"stream": "yes"},
    {"stream_options": 1},
]


@pytest.mark.parametrize("route", SMALLEST)
async def test_what_cannot_be_read_or_served_is_refused(stack: Stack, route: str) -> None:
    changes = [*REFUSED[route], *EVERYWHERE]
    url = f"{stack.url(await stack.lease())}/{route}"
    responses = await post_each(stack, url, ({**SMALLEST[route], **change} for change in changes))
    for change, response in zip(changes, responses, strict=True):
        body = response.json()
        error = body["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error"), change
        if route == "messages":
            assert (body["type"], set(error)) == ("error", {"type", "message", "details"}), change
        else:
            assert set(error) == {"message", "type", "param", "code"}, change
    assert stack.upstream.received == []
