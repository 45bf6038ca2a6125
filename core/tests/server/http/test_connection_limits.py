"""How much one connection can have the server keep, with a key or without: it is closed before that is much."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from agl_core.server.listening import MAX_HEAD_BYTES
from agl_core.testing.server import Stack, running_stack, until

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
        yield reader, writer
    finally:
        writer.close()


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
    async with asyncio.timeout(PATIENCE), connected(stack) as (reader, writer):
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
    async with asyncio.timeout(PATIENCE), connected(stack) as (reader, writer):
        writer.write(first + b"x" * (MAX_HEAD_BYTES - len(first)))
        await writer.drain()
        writer.write(b"x")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"96 KiB" in answer


@pytest.mark.parametrize(
    ("sent", "told"),
    [(b"", b""), (b"GET /agl", b"HTTP/1.1 408"), (HEALTH, b"HTTP/1.1 408"), (HEALTH + b"\r\n" + HEALTH, b"")],
    ids=["nothing", "path", "headers", "a second head"],
)
async def test_who_does_not_end_a_head_is_not_waited_for(
    sent: bytes, told: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_core.server.listening.REQUEST_TIMEOUT", 0.3)
    async with running_stack() as stack, asyncio.timeout(PATIENCE), connected(stack) as (reader, writer):
        writer.write(sent)
        if sent.startswith(HEALTH + b"\r\n"):
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401")
            writer.write(b"x-more: 1\r\n")
        assert (await reader.read()).startswith(told)


TRICKLE = b"POST %b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Type: application/json\r\n"
TRICKLE += b"Content-Length: 100\r\n\r\n{"
"""The head of a request, and the first byte of its body."""


@pytest.mark.parametrize(
    "path", ["/agl/v1/leases", *(f"/rollout/%b/attempt/0/v1/{name}" for name in ("chat/completions", "traces"))]
)
async def test_who_does_not_end_a_body_is_told_and_not_waited_for(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even if there is a byte of it now and then."""
    monkeypatch.setattr("agl_core.server.listening.REQUEST_TIMEOUT", 0.3)
    async with running_stack() as stack, asyncio.timeout(PATIENCE), connected(stack) as (reader, writer):
        attempt = await stack.lease()
        key = stack.server.worker_key if "/agl/" in path else stack.key(attempt)
        place = path.encode() % attempt.rollout.encode() if "%b" in path else path.encode()
        writer.write(TRICKLE % (place, key.encode()))
        # Not to the end: bytes that are sent to a closed connection reset it.
        answer = asyncio.ensure_future(reader.readuntil(b"body did not come in time"))
        while not answer.done():
            writer.write(b" ")
            await asyncio.wait({answer}, timeout=0.05)
        assert answer.result().startswith(b"HTTP/1.1 408 ")
    assert [record for record in caplog.records if record.exc_info] == []


async def test_a_body_has_more_time_the_more_of_it_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_core.server.listening.REQUEST_TIMEOUT", 0.2)
    monkeypatch.setattr("agl_core.server.listening.BODY_BYTES_PER_SECOND", 1000)
    async with running_stack() as stack, asyncio.timeout(PATIENCE), connected(stack) as (reader, writer):
        body = b'{"worker": "w", "capacity": 1, "wait": 0}' + b" " * 9000
        writer.write(b"POST /agl/v1/leases HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body))
        writer.write(b"Authorization: Bearer %b\r\n\r\n" % stack.server.worker_key.encode())
        writer.write(body[:-1])
        await asyncio.sleep(0.5)
        writer.write(body[-1:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


async def test_a_body_that_is_refused_unread_is_not_waited_for_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_core.server.listening.REQUEST_TIMEOUT", 0.3)
    async with running_stack() as stack, asyncio.timeout(PATIENCE), connected(stack) as (reader, writer):
        writer.write(TRICKLE % (b"/agl/v1/leases", b"wrong"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        rest = asyncio.ensure_future(reader.read())
        while not rest.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b" ")
            await asyncio.wait({rest}, timeout=0.05)
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP/1.1" not in rest.result(), "one request has one answer"


async def test_who_hangs_up_leaves_no_traceback(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    key = await stack.lease()
    paths = ["/agl/v1/leases", f"/rollout/{key.rollout}/attempt/0/v1/traces"]
    paths += [f"/rollout/{key.rollout}/attempt/0/v1/{each}" for each in ("chat/completions", "responses", "messages")]
    server, tasks = stack.server, asyncio.all_tasks()
    async with asyncio.timeout(PATIENCE):
        for path in paths:
            holder = server.worker_key if "agl" in path else None
            async with connected(stack) as (_, writer):
                head = TRICKLE % (path.encode(), (holder or server.keys.of_attempt(key)).encode())
                writer.write(head)
                await until(lambda: asyncio.all_tasks() > tasks)  # The server reads the request.
            await until(lambda: asyncio.all_tasks() <= tasks)
    assert [record.getMessage() for record in caplog.records] == []


async def test_invalid_requests_are_refused(stack: Stack) -> None:
    invalid = [b"\x16\x03\x01 no HTTP\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n"]

    async def answer(request: bytes) -> bytes:
        async with asyncio.timeout(PATIENCE), connected(stack) as (reader, writer):
            writer.write(request)
            return await reader.readuntil(b"\r\n\r\n")

    for request in invalid:
        assert (await answer(request)).startswith(b"HTTP/1.1 400 ")
    assert (await answer(HEALTH + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")).startswith(b"HTTP/1.1 401 ")


async def test_replies_that_take_long_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_core.server.listening.REQUEST_TIMEOUT", 0.2)
    async with running_stack() as stack, asyncio.timeout(PATIENCE), connected(stack) as (reader, writer):
        body = b'{"worker": "w", "capacity": 1, "wait": 1.5}'
        key = stack.server.worker_key.encode()
        for _ in range(2):
            writer.write(b"POST /agl/v1/leases HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n" % key)
            writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert (await reader.readuntil(b"}")).startswith(b'{"leases":[]')
            await asyncio.sleep(0.5)  # between requests, a connection is kept for longer


async def test_trailers_are_no_headers(stack: Stack) -> None:
    async with asyncio.timeout(PATIENCE), connected(stack) as (reader, writer):
        writer.write(CHUNKED + b"0\r\nAuthorization: Bearer x\r\n\r\n" + HEALTH + b"\r\n")
        for _ in range(2):
            await reader.readuntil(b"is missing")
