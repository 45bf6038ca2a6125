"""What a request may be at most: bytes, headers, depth. Whatever is too much gets a clear answer of its API's shape."""

from __future__ import annotations

import copy
import gzip
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from agl_core.server.listening import MAX_HEAD_BYTES, MAX_HEADERS
from agl_core.testing.server import Stack, running_stack
from agl_core.types import AttemptKey
from agl_core.wire.workers import MAX_BODY

BODIES = {
    "/v1/chat/completions": b'{"model": "default", "messages": [{"role": "user", "content": "hi"}], "metadata": %s}',
    "/v1/completions": b'{"model": "default", "prompt": "hi", "metadata": %s}',
    "/v1/responses": b'{"model": "default", "input": "hi", "metadata": %s}',
    "/v1/messages": b'{"model": "default", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}],'
    b' "metadata": %s}',
}
WORKERS = {
    "/agl/v1/leases": b'{"worker": %s, "capacity": 1}',
    "/agl/v1/heartbeats": b'{"worker": "w", "attempts": %s}',
    "/agl/v1/rollouts/r0/attempts/0/close": b'{"ending": "lost", "result": %s}',
}

PATIENCE = 120.0
"""Seconds for any part of a request: large ones take long where others need the machine too."""


@pytest.fixture
async def stack(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    """Agents may send as much as others."""
    monkeypatch.setattr("agl_core.server.listening.MAX_AGENT_BODY", MAX_BODY)
    async with running_stack() as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
        yield client


def routes(stack: Stack, key: AttemptKey) -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Each route that takes a body: its URL, a body with a place for anything, and the headers that it needs."""
    agent = {"authorization": f"Bearer {stack.server.keys.of_attempt(key)}"}
    for path, body in BODIES.items():
        yield f"{stack.url(key).removesuffix('/v1')}{path}", body, agent
    for path, body in WORKERS.items():
        holder = stack.server.keys.of_lease(key) if path.endswith("close") else stack.server.worker_key
        yield f"{stack.server.base_url}{path}", body, {"authorization": f"Bearer {holder}"}
    kind = {"content-type": "application/json"}
    yield f"{stack.url(key)}/traces", b'{"resourceSpans": [], "more": %s}', {**agent, **kind}


def message_of(response: httpx.Response) -> str:
    answer: dict[str, Any] = response.json()
    message: str = answer["error"]["message"]
    return message


async def test_bodies_that_are_too_large(stack: Stack, http: httpx.AsyncClient) -> None:
    key = await stack.lease()
    piece = b" " * (1 << 20)

    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY // len(piece) + 1):
            yield piece

    for url, body, headers in routes(stack, key):
        announced = await http.post(url, content=body % (b'"' + b"x" * MAX_BODY + b'"'), headers=headers)
        assert announced.status_code == 413, url
        assert message_of(announced).startswith("The request body is larger than 8 MiB."), url
        chunked = await http.post(url, content=in_pieces(), headers=headers)
        assert (chunked.status_code, message_of(chunked)) == (413, message_of(announced)), url
    assert stack.upstream.received == []
    active = stack.server.queue.attempt(key)
    assert active is not None
    assert not active.closed


async def test_the_largest_body_that_is_allowed(stack: Stack, http: httpx.AsyncClient) -> None:
    key = await stack.lease()
    url, body, headers = next(routes(stack, key))
    room = MAX_BODY - len(body % b'{"x": ""}')
    for more, status in ((0, 200), (1, 413)):
        content = body % (b'{"x": "' + b"x" * (room + more) + b'"}')
        assert (await http.post(url, content=content, headers=headers)).status_code == status
    assert len(stack.upstream.received) == 1


async def test_too_many_headers(stack: Stack, http: httpx.AsyncClient) -> None:
    key = await stack.lease()
    url, body, headers = next(routes(stack, key))
    many = {f"x-{number}": "" for number in range(MAX_HEADERS)}
    for further, status in ((many, 400), ({"x-long": "x" * 4 * MAX_HEAD_BYTES}, 431)):
        response = await http.post(url, content=body % b'"x"', headers={**headers, **further})
        assert response.status_code == status
    assert stack.upstream.received == []


@pytest.mark.parametrize("depth", [20, 100, 128, 200, 250, 254, 255, 100_000])
async def test_nesting_is_taken_or_refused(depth: int, http: httpx.AsyncClient) -> None:
    """At each depth where a parser, a writer or a record between agent and store might give up."""
    async with running_stack() as stack:
        key = await stack.lease()
        for url, body, headers in routes(stack, key):
            for opening, closing in ((b"[", b"]"), (b'{"x":', b"}")):
                nested = opening * depth + b"1" + closing * depth
                response = await http.post(url, content=body % nested, headers=headers)
                assert response.status_code < 500, (url, depth, response.text)
                if url.endswith("traces"):
                    assert response.status_code == (400 if depth > 1000 else 200), "unknown fields are skipped"
                elif depth >= 255:
                    assert response.status_code >= 400, (url, depth)
                elif depth <= 100 and opening == b'{"x":' and "/agl/" not in url:
                    assert response.status_code == 200, (url, depth, response.text)


HELD = {"rollout": "r", "attempt": 0, "secret": "s"}
STRICT: list[tuple[str, str, dict[str, Any], str, list[Any]]] = [
    ("POST", "/agl/v1/leases", {"worker": "w", "capacity": 1}, "capacity", [True, "1", 1.0, [1]]),
    ("POST", "/agl/v1/leases", {"worker": "w", "capacity": 1, "wait": 0}, "wait", [False, "0"]),
    ("POST", "/agl/v1/heartbeats", {"worker": "w", "attempts": [HELD]}, "attempts.0.attempt", [False, "0", 0.0]),
    (
        "POST", "/agl/v1/rollouts/r/attempts/0/close", {"ending": "lost", "rewards": [{"value": 1}]},
        "rewards.0.value", [True, "1"],
    ),
    (
        "POST", "/agl/v1/rollouts/r/attempts/0/close", {"ending": "lost", "result": None, "error": None}, "error",
        [1, False],
    ),
]  # fmt: skip
"""Requests with a place in them, and what is of another type there than is asked for."""


@pytest.mark.parametrize(("method", "path", "body", "place", "values"), STRICT, ids=lambda each: str(each)[:40])
async def test_types_are_strict_in_what_workers_ask(
    method: str, path: str, body: dict[str, Any], place: str, values: list[Any], stack: Stack, http: httpx.AsyncClient
) -> None:
    """`false` is no number and "1" no integer; and what is of the right type is not refused for it."""
    keys = stack.server.keys
    key = keys.of_lease(AttemptKey("r", 0)) if path.endswith("/close") else keys.worker
    http.headers["authorization"] = f"Bearer {key}"
    assert (await http.request(method, f"{stack.server.base_url}{path}", json=body)).status_code != 422
    for value in values:
        changed = copy.deepcopy(body)
        here: Any = changed
        *way, last = (int(part) if part.isdigit() else part for part in place.split("."))
        for part in way:
            here = here[part]
        here[last] = value
        refused = await http.request(method, f"{stack.server.base_url}{path}", json=changed)
        assert refused.status_code == 422, value
        assert place in message_of(refused), value


async def test_gzip_bodies_of_agents_are_inflated_up_to_the_limit(stack: Stack, http: httpx.AsyncClient) -> None:
    key = await stack.lease()
    zipped = {"content-encoding": "gzip", "authorization": f"Bearer {stack.server.keys.of_attempt(key)}"}
    for path, body in BODIES.items():
        url = f"{stack.url(key).removesuffix('/v1')}{path}"
        plain = body % b"{}"
        assert (await http.post(url, content=gzip.compress(plain), headers=zipped)).status_code == 200, path
        bomb = gzip.compress(b" " * MAX_BODY + plain)
        assert len(bomb) < MAX_BODY >> 8
        for content, status in ((bomb, 413), (gzip.compress(plain)[:-9], 400), (plain, 400)):
            assert (await http.post(url, content=content, headers=zipped)).status_code == status, path
        other = await http.post(url, content=plain, headers={**zipped, "content-encoding": "zstd"})
        assert (other.status_code, "'zstd' is not known" in message_of(other)) == (415, True)
    assert len(await stack.calls(key)) == len(BODIES)


async def test_numbers_in_headers_may_have_any_length(stack: Stack, http: httpx.AsyncClient) -> None:
    key = await stack.lease()
    digits = "9" * 5000
    headers = {"authorization": f"Bearer {stack.server.keys.of_attempt(key)}"}
    url, body = f"{stack.url(key)}/chat/completions", BODIES["/v1/chat/completions"] % b"{}"
    counted = await http.post(url, content=body, headers={**headers, "x-stainless-retry-count": digits})
    assert counted.status_code == 200
    elsewhere = await http.post(url, content=body, headers={**headers, "x-agl-rollout": f"r0/{digits}"})
    assert elsewhere.status_code == 400
