"""Whatever anybody sends to whatever route: no failure of the server, and nothing of another's rollout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_core.capture.requests import HEADER_AGENT, HEADER_PARENT_SPAN, HEADER_ROLLOUT, HEADER_STATE
from agl_core.testing import episodes as make
from agl_core.testing.scripts import Say
from agl_core.types import AttemptKey, Json, Task
from agl_core.wire import LeaseRequest
from agl_server.testing import Stack, running_stack

OWN, OTHER = AttemptKey("own", 0), AttemptKey("other", 0)
SECRET = "SWORDFISH"
"""A word of the other rollout's task, reply and ids alone."""
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
TEXT = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
VALID: Mapping[str, Json] = {
    "/v1/chat/completions": {
        "model": "default",
        "messages": [*TEXT, {"role": "assistant", "tool_calls": [CALLED]}, {"role": "tool", "tool_call_id": "c1"}],
        "tools": [TOOL],
        "temperature": 0.5,
        "max_tokens": 9,
        "seed": 1,
        "n": 1,
        "stop": ["x"],
    },
    "/v1/completions": {"model": "default", "prompt": "hi", "max_tokens": 9, "stream": True, "seed": 1},
    "/v1/responses": {
        "model": "default",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
        "previous_response_id": None,
        "max_output_tokens": 9,
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {
        "model": "default",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}]},
        ],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        "stop_sequences": ["x"],
    },
    "/v1/responses/input_tokens": {
        "input": [{"type": "reasoning", "id": f"rs_{'0' * 32}", "summary": []}, {"role": "user", "content": "hi"}]
    },
    "/v1/messages/count_tokens": {
        "messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "d"}}]}],
        "tools": [{"type": "bash_20250124", "name": "bash", "defer_loading": True}],
        "thinking": {"type": "adaptive"},
    },
    "/v1/models": {},
    "/v1/nothing": {},
    "/agl/v1/leases": {"worker": "w", "capacity": 1, "wait": 0},
    "/agl/v1/heartbeats": {"worker": "w", "attempts": [{"rollout": "third", "attempt": 0, "secret": "s"}]},
    "/agl/v1/rollouts/third/attempts/0/close": {
        "ending": "finished",
        "result": {"a": [1]},
        "error": None,
        "tool_results": [
            {"id": "o", "rollout": "other", "attempt": 0, "tool": "add", "status": "ok", "arguments": {"a": 1}}
        ],
        "rewards": [{"name": "r", "value": 0.5}],
    },
    "/agl/v1/rollouts/third/attempts/00/close": {"ending": "vanished"},
    "/agl/v1/health": {},
}


async def begin(stack: Stack) -> str:
    """Lease three attempts, of which the other one makes a call; the id of its reply."""
    names = {"own": "t", "other": SECRET, "third": "t"}
    await stack.server.queue.enqueue([make.rollout(name, task=Task("t", input)) for name, input in names.items()])
    await stack.server.queue.lease(LeaseRequest(worker="never beats", capacity=3))
    stack.upstream.script(Say(SECRET))
    return (await stack.client(OTHER).responses.create(model="default", input=SECRET)).id


@pytest.fixture(scope="module")
def world() -> Iterator[SimpleNamespace]:
    """A server over the real store, in a thread."""
    running = running_stack(timeout=3600)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(running) as stack:
        reply, keys = portal.call(begin, stack), stack.server.keys
        whose = {"own": keys.of_attempt(OWN), "worker": keys.worker, "lease": keys.of_lease(AttemptKey("third", 0))}
        with httpx.Client(base_url=stack.server.base_url, trust_env=False, timeout=30) as client:
            yield SimpleNamespace(
                store=stack.store, call=portal.call, client=client, reply=reply, keys={**whose, "none": "agl-none"}
            )


numbers = st.integers() | st.floats() | st.sampled_from([2**63, 2**64, -(2**63) - 1, 10**40, 1e308, 0, -1])
odd_texts = st.text(max_size=20) | st.sampled_from(["other/0", "tool", "\x00\x1b[31m"])
scalars = st.none() | st.booleans() | numbers | odd_texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def paths(value: Json, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value in a JSON value, itself included."""
    yield above
    named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in named:
        yield from paths(inner, (*above, name))


def replaced(value: Json, path: tuple[Any, ...], new: Json) -> Json:
    if not path:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = replaced(value[path[0]], path[1:], new)
    return copied


@st.composite
def bodies(draw: st.DrawFn, valid: Json) -> bytes:
    """A valid body with one or two places changed; or anything."""
    for _ in range(draw(st.integers(0, 2))):
        path = draw(st.sampled_from(list(paths(valid))))
        valid = replaced(valid, path, draw(values))
    text = json.dumps(valid).encode()
    cut = draw(st.integers(0, 20))
    return draw(st.binary(max_size=40)) if cut == 1 else text[: len(text) // 2] if cut == 2 else text


def plain(text: str) -> str:
    return "".join(character for character in text if " " <= character <= "~").strip() or "x"


header_texts = st.text(max_size=30).map(plain)
some_names = ["own/0", "other/0", "own/1", "other/00", "/", "own", "own/-1", "own/" + "9" * 30]
names = st.sampled_from(some_names) | header_texts
headers = st.fixed_dictionaries(
    {},
    optional={
        HEADER_ROLLOUT: names,
        HEADER_AGENT: header_texts | st.just("%00%1b%ff%ed%a0%80"),
        HEADER_PARENT_SPAN: header_texts,
        HEADER_STATE: header_texts | st.just("eJyrrgUAAXUA-Q=="),
        "x-stainless-retry-count": st.sampled_from(["0", "1", "-1", "x", "9" * 40]),
        "content-encoding": st.sampled_from(["gzip", "br", "identity"]),
        "content-type": st.sampled_from(["application/json", "application/x-protobuf", "text/plain", "x"]),
        "x-api-key": header_texts,
    },
)
prefixes = st.sampled_from(
    [
        "/rollout/own/attempt/0",
        "/rollout/own/attempt/%30",
        "",
        "/rollout/other/attempt/0",
        "/rollout/other/attempt/00",
        "/rollout/own%2F..%2Fother/attempt/0",
        "/rollout/%00%1b/attempt/x",
    ]
)


@settings(max_examples=4 * settings.default.max_examples)
@given(
    st.sampled_from(sorted(VALID)),
    st.sampled_from(["POST", "POST", "POST", "GET", "PUT"]),
    st.sampled_from(["own", "own", "worker", "lease", "none"]),
    prefixes,
    headers,
    st.data(),
)
def test_no_request_breaks_the_server_or_reaches_another_rollout(
    world: SimpleNamespace, path: str, method: str, who: str, prefix: str, given: dict[str, str], data: st.DataObject
) -> None:
    body = data.draw(bodies(VALID[path]))
    if path == "/agl/v1/leases":
        body = body.replace(b'"wait": 0', b'"wait": 0.0') if b'"wait": 0' in body else b"{}"
    if path == "/v1/responses" and data.draw(st.booleans()):
        body = json.dumps({**VALID[path], "previous_response_id": world.reply}).encode()
    url = path if path.startswith("/agl") else f"{prefix}{path}"
    sent = {"content-type": "application/json", **given, "authorization": f"Bearer {world.keys[who]}"}
    response = world.client.request(method, url, content=body, headers=sent)
    assert response.status_code < 500, response.text
    if who in ("own", "none"):
        assert SECRET not in response.text
        if "/agl/" in path or "other" in prefix or who == "none":
            assert response.status_code >= 400
    assert len(world.call(world.store.calls, [OTHER])) == 1, "a call was recorded for the other"
    assert world.call(world.store.tool_results, [OTHER]) == [], "spans were taken in for the other"


def test_the_requests_above_reach_what_they_aim_at(world: SimpleNamespace) -> None:
    """They are taken unchanged, so that a change of one place tests what lies behind it."""
    for path, valid in VALID.items():
        agents = not path.startswith("/agl")
        who = "own" if agents else "lease" if path.endswith("close") else "worker"
        method = "GET" if path.endswith(("models", "health")) else "POST"
        response = world.client.request(
            method,
            f"{'/rollout/own/attempt/0' if agents else ''}{path}",
            content=json.dumps(valid),
            headers={"authorization": f"Bearer {world.keys[who]}", "content-type": "application/json"},
        )
        expected = {"/v1/nothing": 404, "/agl/v1/rollouts/third/attempts/00/close": 422}.get(path, 200)
        assert response.status_code == expected, (path, response.text)
