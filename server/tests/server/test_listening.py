"""HTTP below the routes: what one connection or request may cost, and replies as bytes."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import orjson
import pytest

from agl_core.capture.requests import rollout_path
from agl_core.testing.scripts import Hold
from agl_core.types import AttemptKey
from agl_core.wire import MAX_BODY, MAX_VALUES
from agl_server.http.listening import MAX_HEAD_BYTES, run
from agl_server.testing import Stack, running_stack, until

from .server_aids import GOOD, open_attempt

PATIENCE = 120.0
OFFERED = 96 << 20
"""Bytes that a client is ready to send."""
ACCEPTED = 24 << 20
"""Bytes that may be on their way when the connection is closed: what the buffers of both ends take, and to spare."""
HEALTH = b"GET /agl/v1/health HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /agl/v1/leases HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
LINE = b"x" * 8000


@contextlib.asynccontextmanager
async def connected(stack: Stack) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.server.base_url.rpartition(":")[2]))
    try:
        async with asyncio.timeout(PATIENCE):
            yield reader, writer
    finally:
        writer.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_server.http.listening.REQUEST_TIMEOUT", 0.3)


def endless(first: bytes, then: bytes) -> Iterator[bytes]:
    yield first
    yield from itertools.repeat(then * (-(-65536 // len(then))), OFFERED // 65536)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (HEALTH + b"X-Long: ", LINE),
        (HEALTH, b"a:\r\n"),
        (HEALTH, b"x-" + LINE + b": 1\r\n"),
        (b"GET /" + LINE, LINE),
        (b"GET /v1/models?q=", LINE),
        (b"", LINE),
        (HEALTH + b"\r\n" + HEALTH + b"X-Long: ", LINE),
        (CHUNKED + b"0\r\n", b"x-trailer: " + LINE + b"\r\n"),
        (CHUNKED + b"0\r\nx-trailer: ", LINE),
        (CHUNKED + b"1;" + LINE, LINE),
        (b"", HEALTH + b"\r\n"),
    ],
    ids=[
        "a header", "headers", "names", "path", "query", "method", "a second head", "trailers", "a trailer",
        "an extension", "requests ahead",
    ],
)  # fmt: skip
async def test_what_never_ends_is_cut_off(stack: Stack, first: bytes, then: bytes) -> None:
    sent = 0
    async with connected(stack) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            for piece in endless(first, then):
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
            while await reader.read(65536):
                pass
    assert sent < ACCEPTED


@pytest.mark.parametrize("first", [b"GET /", HEALTH + b"X-Long: "], ids=["path", "header"])
async def test_who_sends_too_long_a_head_is_told(stack: Stack, first: bytes) -> None:
    async with connected(stack) as (reader, writer):
        writer.write(first + b"x" * (MAX_HEAD_BYTES - len(first)))
        await writer.drain()
        writer.write(b"x")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"96 KiB" in answer


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("sent", "start"),
    [(b"", b""), (b"GET /agl", b"HTTP/1.1 408"), (HEALTH, b"HTTP/1.1 408"), (HEALTH + b"\r\n" + HEALTH, b"")],
    ids=["nothing", "path", "headers", "a second head"],
)
async def test_who_does_not_end_a_head_is_not_waited_for(sent: bytes, start: bytes, stack: Stack) -> None:
    async with connected(stack) as (reader, writer):
        writer.write(sent)
        if sent.startswith(HEALTH + b"\r\n"):
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401")
            writer.write(b"x-more: 1\r\n")
        assert (await reader.read()).startswith(start)


TRICKLE = b"POST %b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Type: application/json\r\n"
TRICKLE += b"Content-Length: 100\r\n\r\n{"
"""The head of a request, and the first byte of its body."""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", ["/agl/v1/leases", "/rollout/%b/attempt/0/v1/chat/completions"])
async def test_who_does_not_end_a_body_is_told_and_not_waited_for(
    path: str, stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    """A byte of it now and then makes no difference."""
    async with connected(stack) as (reader, writer):
        attempt = await stack.lease()
        key = stack.server.worker_key if "/agl/" in path else stack.key(attempt)
        target = path.encode() % attempt.rollout.encode() if "%b" in path else path.encode()
        writer.write(TRICKLE % (target, key.encode()))
        # Not to the end: bytes that are sent to a closed connection reset it.
        answer = asyncio.ensure_future(reader.readuntil(b"body did not come in time"))
        while not answer.done():
            writer.write(b" ")
            await asyncio.wait({answer}, timeout=0.05)
        assert answer.result().startswith(b"HTTP/1.1 408 ")
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.usefixtures("impatient")
async def test_a_body_has_more_time_the_more_of_it_there_is(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_server.http.listening.BODY_BYTES_PER_SECOND", 1000)
    async with connected(stack) as (reader, writer):
        body = b'{"worker": "w", "capacity": 1, "wait": 0}' + b" " * 9000
        writer.write(b"POST /agl/v1/leases HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body))
        writer.write(b"Authorization: Bearer %b\r\n\r\n" % stack.server.worker_key.encode())
        writer.write(body[:-1])
        await asyncio.sleep(0.5)
        writer.write(body[-1:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.usefixtures("impatient")
async def test_a_body_that_is_refused_unread_is_not_waited_for_either(stack: Stack) -> None:
    async with connected(stack) as (reader, writer):
        writer.write(TRICKLE % (b"/agl/v1/leases", b"wrong"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        rest = asyncio.ensure_future(reader.read())
        while not rest.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b" ")
            await asyncio.wait({rest}, timeout=0.05)
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP/1.1" not in rest.result(), "one request has one answer"


async def test_who_hangs_up_leaves_no_traceback(
    stack: Stack, key: AttemptKey, caplog: pytest.LogCaptureFixture
) -> None:
    holders = {"/agl/v1/leases": stack.server.worker_key}
    holders |= {f"{rollout_path(*key)}/v1/{r}": stack.key(key) for r in ("chat/completions", "responses", "messages")}
    tasks = asyncio.all_tasks()
    async with asyncio.timeout(PATIENCE):
        for path, holder in holders.items():
            async with connected(stack) as (_, writer):
                writer.write(TRICKLE % (path.encode(), holder.encode()))
                await until(lambda: asyncio.all_tasks() > tasks)  # The server reads the request.
            await until(lambda: asyncio.all_tasks() <= tasks)
    assert [record.getMessage() for record in caplog.records] == []


async def test_invalid_requests_are_refused(stack: Stack) -> None:
    for request, status in (
        (b"\x16\x03\x01 no HTTP\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET http://[ HTTP/1.1\r\n\r\n", 400),
        (HEALTH + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 401),
    ):
        async with connected(stack) as (reader, writer):
            writer.write(request)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.usefixtures("impatient")
async def test_replies_that_take_long_are_waited_for(stack: Stack) -> None:
    async with connected(stack) as (reader, writer):
        body = b'{"worker": "w", "capacity": 1, "wait": 0.5}'
        key = stack.server.worker_key.encode()
        for _ in range(2):
            writer.write(b"POST /agl/v1/leases HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n" % key)
            writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert (await reader.readuntil(b"}")).startswith(b'{"leases":[]')
            await asyncio.sleep(0.4)  # between requests, a connection is kept for longer


async def test_trailers_are_no_headers(stack: Stack) -> None:
    async with connected(stack) as (reader, writer):
        writer.write(CHUNKED + b"0\r\nAuthorization: Bearer x\r\n\r\n" + HEALTH + b"\r\n")
        for _ in range(2):
            await reader.readuntil(b"is missing")


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


@pytest.fixture
async def stack(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    """Agents may send as much as others."""
    monkeypatch.setattr("agl_server.http.listening.MAX_AGENT_BODY", MAX_BODY)
    async with running_stack() as running:
        yield running


def routes(stack: Stack, key: AttemptKey) -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Each route that takes a body: its URL, a body with a place for anything, and the headers that it needs."""
    agent = {"authorization": f"Bearer {stack.server.keys.of_attempt(key)}"}
    for path, body in BODIES.items():
        yield f"{stack.url(key).removesuffix('/v1')}{path}", body, agent
    for path, body in WORKERS.items():
        holder = stack.server.keys.of_lease(key) if path.endswith("close") else stack.server.worker_key
        yield f"{stack.server.base_url}{path}", body, {"authorization": f"Bearer {holder}"}


def message_of(response: httpx.Response) -> str:
    answer: dict[str, Any] = response.json()
    message: str = answer["error"]["message"]
    return message


async def test_bodies_that_are_too_large(stack: Stack, key: AttemptKey, http: httpx.AsyncClient) -> None:
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
    assert not open_attempt(stack.server.queue, key).closed
    url, body, headers = next(routes(stack, key))
    room = MAX_BODY - len(body % b'{"x": ""}')
    for more, status in ((0, 200), (1, 413)):
        content = body % (b'{"x": "' + b"x" * (room + more) + b'"}')
        assert (await http.post(url, content=content, headers=headers)).status_code == status
    assert len(stack.upstream.received) == 1


async def test_bodies_with_too_many_values_are_refused_before_they_are_parsed(
    stack: Stack, key: AttemptKey, http: httpx.AsyncClient
) -> None:
    """What stands in strings is no value."""
    url, body, headers = next(routes(stack, key))
    text = body % (b'"' + b'{[,\\"' * MAX_VALUES + b'"')
    assert (await http.post(url, content=text, headers=headers)).status_code == 200
    for url, body, headers in routes(stack, key):
        bomb = body % (b"[" + b"{}," * MAX_VALUES + b"{}]")
        for content, encoding in ((bomb, "identity"), (gzip.compress(bomb, 1), "gzip")):
            refused = await http.post(url, content=content, headers={**headers, "content-encoding": encoding})
            assert (refused.status_code, "200,000 JSON values" in message_of(refused)) == (413, True), url


@pytest.mark.parametrize(
    ("limit", "status"), [("MAX_HELD_OF_ATTEMPT", 429), ("MAX_HELD", 503)], ids=["of an attempt", "of all"]
)
async def test_what_requests_hold_before_they_are_answered_is_bounded(
    limit: str, status: int, stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"agl_server.http.listening.{limit}", 5 << 20)
    key, hold = await stack.lease(), Hold()
    stack.upstream.script(hold)
    url, body, headers = next(routes(stack, key))
    large = body % (b'"' + b"x" * (3 << 20) + b'"')
    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        first = group.create_task(http.post(url, content=large, headers=headers))
        await hold.arrived.wait()
        refused = await http.post(url, content=large, headers=headers)
        assert (refused.status_code, refused.headers["retry-after"]) == (status, "5")
        assert (await http.post(url, content=body % b"1", headers=headers)).status_code == 200
        hold.release.set()
    assert first.result().status_code == 200
    assert (await http.post(url, content=large, headers=headers)).status_code == 200


@pytest.mark.parametrize("depth", [20, 100, 128, 200, 250, 254, 255, 100_000])
async def test_nesting_is_taken_or_refused(depth: int, stack: Stack, key: AttemptKey, http: httpx.AsyncClient) -> None:
    """Parsers, writers and records between agent and store give up at one of these depths or none."""
    for url, body, headers in routes(stack, key):
        for opening, closing in ((b"[", b"]"), (b'{"x":', b"}")):
            nested = opening * depth + b"1" + closing * depth
            response = await http.post(url, content=body % nested, headers=headers)
            assert response.status_code < 500, (url, depth, response.text)
            if depth >= 255:
                assert response.status_code >= 400, (url, depth)
            elif depth <= 100 and opening == b'{"x":' and "/agl/" not in url:
                assert response.status_code == 200, (url, depth, response.text)


HELD = {"rollout": "r", "attempt": False, "secret": "s"}
CLOSED = "rollouts/r/attempts/0/close"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("leases", {"worker": "w", "capacity": True}, "capacity"),
        ("leases", {"worker": "w", "capacity": 1, "wait": "0"}, "wait"),
        ("heartbeats", {"worker": "w", "attempts": [HELD]}, "attempts.0.attempt"),
        (CLOSED, {"ending": "lost", "rewards": [{"value": "1"}]}, "rewards.0.value"),
        (CLOSED, {"ending": "lost", "error": 1}, "error"),
    ],
)
async def test_types_are_strict_in_what_workers_ask(
    path: str, body: dict[str, Any], field: str, stack: Stack, http: httpx.AsyncClient
) -> None:
    """`false` is no number and "1" no integer."""
    keys = stack.server.keys
    key = keys.of_lease(AttemptKey("r", 0)) if path == CLOSED else keys.worker
    headers = {"authorization": f"Bearer {key}"}
    refused = await http.post(f"{stack.server.base_url}/agl/v1/{path}", json=body, headers=headers)
    assert (refused.status_code, field in message_of(refused)) == (422, True), refused.text


async def test_gzip_bodies_of_agents_are_inflated_up_to_the_limit(
    stack: Stack, key: AttemptKey, http: httpx.AsyncClient
) -> None:
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


async def test_numbers_in_headers_may_have_any_length(stack: Stack, key: AttemptKey, http: httpx.AsyncClient) -> None:
    digits = "9" * 5000
    headers = {"authorization": f"Bearer {stack.server.keys.of_attempt(key)}"}
    url, body = f"{stack.url(key)}/chat/completions", BODIES["/v1/chat/completions"] % b"{}"
    counted = await http.post(url, content=body, headers={**headers, "x-stainless-retry-count": digits})
    assert counted.status_code == 200
    elsewhere = await http.post(url, content=body, headers={**headers, "x-agl-rollout": f"r0/{digits}"})
    assert elsewhere.status_code == 400


def request(key: str, path: str, *lines: str) -> bytes:
    body, head = orjson.dumps(GOOD), [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", *lines]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


def test_a_reply_comes_in_one_piece_from_the_loop_of_production() -> None:
    async def serve() -> None:
        async with running_stack() as stack:
            key = await stack.lease()
            async with connected(stack) as (reader, writer):
                for _ in range(3):
                    writer.write(request(stack.key(key), f"{rollout_path(*key)}/v1/chat/completions"))
                    _, _, body = (await reader.read(1 << 20)).partition(b"\r\n\r\n")
                    assert orjson.loads(body)["choices"], "its head alone woke the client up"

    run(serve())


async def test_requests_sent_at_once_are_answered_in_their_order(stack: Stack, key: AttemptKey) -> None:
    token, path = stack.key(key), f"{rollout_path(*key)}/v1/chat/completions"
    async with connected(stack) as (reader, writer):
        writer.write(request(token, path) + request(token, "/v1/nothing") + request(token, path, "Connection: close"))
        replies = await reader.read()
    assert re.findall(rb"HTTP/1.1 (\d+)", replies) == [b"200", b"404", b"200"]
