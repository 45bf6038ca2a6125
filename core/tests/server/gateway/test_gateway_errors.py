"""What the gateway refuses, and what it makes of an upstream that fails."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from agl_core.testing.scripts import OVERFLOW, Drop, Fail, Hold, Raw
from agl_core.testing.server import Stack, running_stack
from agl_core.types import AttemptKey, Ending
from agl_core.wire.headers import HEADER_ROLLOUT
from agl_core.wire.workers import CloseRequest

from ..posting import post, said_by_agl

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GOOD: dict[str, Any] = {"model": "default", "messages": HELLO}


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_bodies_that_are_no_json_object(stack: Stack) -> None:
    url = f"{stack.url(await stack.lease())}/chat/completions"
    for body in (b"", b"{", b"[]", b"3", b'{"temperature": NaN}', b"\xff"):
        response = await post(stack, url, body)
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_json"), body


async def test_the_agents_key_is_checked(stack: Stack) -> None:
    key = await stack.lease()
    for wrong in ("nonsense", stack.server.worker_key, "schlüssel"):
        async with httpx.AsyncClient(trust_env=False) as client:
            for method, path in (("POST", "chat/completions"), ("GET", "models")):
                header = {"Authorization": f"Bearer {wrong}".encode()}
                response = await client.request(method, f"{stack.url(key)}/{path}", headers=header, json=GOOD)
                assert response.status_code == 401
                assert error_of(response)["code"] == "invalid_api_key"
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{stack.url()}/models")).status_code == 401
    with pytest.raises(openai.AuthenticationError, match="OPENAI_API_KEY"):
        await stack.client(key, api_key="nonsense").chat.completions.create(**GOOD)


async def test_a_call_must_belong_to_a_rollout(stack: Stack) -> None:
    key = await stack.lease()
    with pytest.raises(openai.AuthenticationError, match=r"context\.base_url and context\.api_key"):
        await stack.client().chat.completions.create(**GOOD)
    for unknown in (AttemptKey("nobody", 0), AttemptKey(key.rollout, 5)):
        with pytest.raises(openai.NotFoundError, match=unknown.rollout):
            await stack.client(unknown).chat.completions.create(**GOOD)
    for header in ("", "nobody", "nobody/x", f"{key.rollout}/-1", f"{key.rollout}/9"):
        with pytest.raises(openai.AuthenticationError):
            await stack.client(
                api_key=stack.key(key), default_headers={HEADER_ROLLOUT: header}
            ).chat.completions.create(**GOOD)
    with pytest.raises(openai.BadRequestError, match="header x-agl-rollout"):
        await stack.client(key, default_headers={HEADER_ROLLOUT: "other/0"}).chat.completions.create(**GOOD)
    assert stack.upstream.received == []


async def test_unknown_routes_say_what_there_is(stack: Stack) -> None:
    key = await stack.lease()
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        await stack.client(key).files.list()
    response = await post(stack, f"{stack.url()}/models", b"")
    assert response.status_code == 405
    assert "does not serve POST" in error_of(response)["message"]


FAILURES: list[tuple[Any, int, str]] = [
    (Fail(500), 502, "answered 500: scripted failure"),
    (Fail(503, "<html>"), 502, "answered 503"),
    (Fail(302), 502, "answered 302"),
    (Fail(401), 502, "agl's own API key"),
    (Drop(), 502, "broke off"),
    (Raw(b"<html>hi</html>"), 502, "not a chat completion"),
    (Raw(b"{}"), 502, "not a chat completion"),
    (Raw(b'{"choices": []}'), 502, "no choices"),
    (Raw(b'{"choices": [{"index": 0, "message": 3, "finish_reason": "stop"}]}'), 502, "message"),
    (Raw(b'{"choices": [{"message": {"content": [{"type": "image", "image": "x"}]}}]}'), 502, "'image'"),
    (Raw(b'{"choices": [{"message": {"tool_calls": [{"function": {"arguments": "{}"}}]}}]}'), 502, "name"),
    (
        Raw(b'{"choices": [{"index": 0, "message": {}, "finish_reason": "stop", "token_ids": ["1"]}]}'),
        502,
        "integers",
    ),
    (Fail(422, {"detail": [{"loc": ["n"], "msg": "too many"}]}), 422, "too many"),
    (Fail(400, {"object": "error", "message": "no grammar for this schema", "code": 400}), 400, "no grammar"),
    (Fail(429), 429, "scripted failure"),
]


async def test_upstream_failures_become_clear_errors(stack: Stack) -> None:
    key = await stack.lease()
    for step, status, says in FAILURES:
        stack.upstream.script(step)
        response = await post(stack, f"{stack.url(key)}/chat/completions", json.dumps(GOOD).encode())
        assert response.status_code == status, step
        assert says in error_of(response)["message"], step
        assert "Traceback" not in response.text
    assert await stack.calls(key) == []


async def test_an_upstream_that_is_down(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}/v1"
    async with running_stack(upstream_fields=lambda _: {"urls": (url,)}) as stack:
        with pytest.raises(openai.InternalServerError, match="Is the engine running"):
            await stack.client(await stack.lease()).chat.completions.create(**GOOD)


async def test_an_upstream_that_hangs_is_given_up() -> None:
    async with running_stack(timeout=0.05) as stack:
        stack.upstream.script(Hold())
        response = await post(stack, f"{stack.url(await stack.lease())}/chat/completions", json.dumps(GOOD).encode())
        assert response.status_code == 504
        assert "did not answer" in error_of(response)["message"]


async def test_context_overflow_is_recognised_and_counted(stack: Stack) -> None:
    key = await stack.lease()
    own_words = Fail(400, {"error": {"message": "too long", "type": "x", "code": "context_length_exceeded"}})
    for step in (OVERFLOW, own_words):
        stack.upstream.script(step)
        with pytest.raises(openai.BadRequestError) as raised:
            await stack.client(key).chat.completions.create(**GOOD)
        assert raised.value.code == "context_length_exceeded"
    attempt = stack.server.queue.attempt(key)
    assert attempt is not None
    assert attempt.context_overflows == 2
    await stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.CRASHED, error="BadRequestError"))
    assert (await stack.server.queue.done([key.rollout]))[0].ending is Ending.CONTEXT_OVERFLOW


@pytest.mark.parametrize(("came_back", "ending"), [(False, Ending.LOST), (True, Ending.CRASHED)])
async def test_an_agent_that_broke_because_the_model_server_was_gone_is_lost(
    stack: Stack, came_back: bool, ending: Ending
) -> None:
    """It had acted, so its crash would be data; once a call is answered again, it is."""
    key = await stack.lease()
    await stack.client(key).chat.completions.create(**GOOD)
    stack.upstream.script(Drop())
    response = await post(stack, f"{stack.url(key)}/chat/completions", json.dumps(GOOD).encode())
    assert (response.status_code, error_of(response)["code"]) == (502, "upstream_gone")
    if came_back:
        await stack.client(key).chat.completions.create(**GOOD)
    closed = await stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.CRASHED, error="502"))
    assert closed.counted is came_back
    [attempt] = await stack.store.attempts(key.rollout)
    assert attempt.ending is ending


async def test_a_store_that_fails_costs_the_reply_and_not_the_policy(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent that breaks of it has not failed its task: the rollout is tried again."""
    key = await stack.lease()
    await stack.client(key).chat.completions.create(**GOOD)
    stack.store.failing = True
    response = await post(stack, f"{stack.url(key)}/chat/completions", json.dumps(GOOD).encode())
    assert (response.status_code, error_of(response)["code"]) == (503, "store_failed")
    assert int(response.headers["retry-after"]) > 0
    assert "scripted failure" in said_by_agl(caplog)
    assert "Traceback" not in said_by_agl(caplog) + response.text
    stack.store.failing = False
    assert not (await stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.CRASHED, error="500"))).counted
    [attempt] = await stack.store.attempts(key.rollout)
    assert attempt.ending is Ending.LOST
    assert len(await stack.calls(key)) == 1
