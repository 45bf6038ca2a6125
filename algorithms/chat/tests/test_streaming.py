"""Replies as their tokens come: what the gateway adds up of the chunks is the reply that would have come whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_chat.api import create_app
from agl_core.apis.streamed import StreamedCompletion
from agl_core.errors import EngineError

from .conftest import CALCULATOR, CALL, USER, ScriptedBackend, ServedModel, client_of, make_model

TEXTS = [
    "The answer is 42.",
    "Grüße, 世界! 🎉",
    "12 STOP 3",
    "a <tool_call",
    CALL,
    f"Let me see.\n{CALL}\n{CALL}",
    "\n\n",
]
MODEL = make_model("qwen2", "<|im_end|>", "<|endoftext|>")
TOKENIZER = MODEL.tokenizer
parts = st.sampled_from([TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in TEXTS]) | st.lists(
    st.integers(0, len(TOKENIZER) - 1), max_size=6
)
responses = st.lists(parts, max_size=4).map(lambda some: [token for part in some for token in part if token > 1])


def answer(model: ServedModel, backend: ScriptedBackend, **fields: Any) -> tuple[int, str]:
    """Status and body of a reply."""

    async def ask() -> tuple[int, str]:
        client = client_of(create_app({"m": model.server()}, backend, api_key="key"))
        body = {"model": "m", "messages": [USER], "n": len(backend.responses), "seed": 1, "logprobs": True}
        body |= {"return_token_ids": True, **fields}
        reply = await client.post("/v1/chat/completions", json=body, headers={"x-agl-rollout": "r/0"})
        return reply.status_code, reply.text

    return asyncio.run(ask())


def chunks_of(body: str) -> list[dict[str, Any]]:
    *events, last = body.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def added(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The chat completion that the gateway makes of chunks."""
    completion = StreamedCompletion("reply")
    for chunk in chunks:
        completion.add(chunk)
    return json.loads(completion.whole())


def without(body: dict[str, Any]) -> dict[str, Any]:
    """The fields that two replies have in common and that are not null."""
    for choice in body["choices"]:
        choice["message"] = {name: value for name, value in choice["message"].items() if value}
        choice["logprobs"].pop("refusal", None)
    kept = {name: value for name, value in body.items() if name not in ("id", "created")}
    return {**kept, "choices": [{k: v for k, v in choice.items() if v is not None} for choice in kept["choices"]]}


@given(
    ids=st.lists(responses, min_size=1, max_size=3),
    sent=st.integers(0, 40) | st.just(10**6),
    pauses=st.sets(st.integers(0, 80)),
    tools=st.booleans(),
    stop=st.sampled_from([[], ["STOP"], ["42", "2 S", "界"]]),
    top=st.sampled_from([0, 1]),
)
def test_chunks_add_up_to_the_whole_reply(
    ids: list[list[int]], sent: int, pauses: set[int], tools: bool, stop: list[str], top: int
) -> None:
    fields: dict[str, Any] = {"tools": [CALCULATOR]} if tools else {}
    fields |= {"stop": stop, "top_logprobs": top}
    backend = ScriptedBackend(ids, sent, sorted(pauses))
    status, body = answer(MODEL, backend, **fields)
    assert status == 200, body
    _, streamed = answer(MODEL, backend, **fields, stream=True)
    chunks = chunks_of(streamed)
    assert without(added(chunks)) == without(json.loads(body))
    assert [number for number, chunk in enumerate(chunks) if "prompt_token_ids" in chunk] == [0]
    assert [number for number, chunk in enumerate(chunks) if "usage" in chunk] == [len(chunks) - 1]


def test_text_comes_with_its_tokens_and_may_wait_for_more(qwen: ServedModel) -> None:
    ids = TOKENIZER("世 12 ST 3", add_special_tokens=False)["input_ids"]
    _, body = answer(qwen, ScriptedBackend([ids], pauses=range(99)), stream=True, stop=["STOP"])
    choices = [choice for chunk in chunks_of(body) for choice in chunk["choices"]]
    pieces = [choice["delta"].get("content", "") for choice in choices]
    assert "".join(pieces) == "世 12 ST 3"
    assert sum(map(bool, pieces)) > 4
    assert sum(len(choice.get("token_ids", ())) for choice in choices) == len(ids) + 1
    before = TOKENIZER.decode([token for choice in choices[:4] for token in choice["token_ids"]])
    assert before.startswith("".join(pieces[:4]))


@pytest.mark.parametrize("sent", [0, 4])
def test_a_failure_has_a_status_before_the_first_token_and_ends_the_stream_later(sent: int, qwen: ServedModel) -> None:
    failing = ScriptedBackend([[5, 6, 7, 8]], sent, range(9), EngineError("Sampling failed."))
    status, body = answer(qwen, failing, stream=True)
    assert status == (200 if sent else 500)
    error = json.loads(body.removesuffix("\n\n").split("\n\n")[-1].removeprefix("data: "))["error"]
    assert (error["message"], error["code"]) == ("Sampling failed.", "engine_error")
    assert "[DONE]" not in body


async def test_who_hangs_up_before_the_request_is_whole_raises_nothing() -> None:
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}
    scope["headers"] = [(b"authorization", b"Bearer key")]

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    await create_app({}, ScriptedBackend([]), api_key="key")(scope, receive, send)
