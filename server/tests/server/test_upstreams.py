"""Model servers: connections to them, which of several answers, and one that is away."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import Mock

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agl_core.apis.errors import ApiError
from agl_core.capture.requests import HEADER_MOVED, HEADER_ROLLOUT
from agl_core.protocols import Upstream
from agl_core.testing.scripts import Drop, Fail, Hold
from agl_core.testing.upstream import ScriptedUpstream, served
from agl_core.types import AttemptKey
from agl_server.gateway.upstream import MAX_UNREAD, REST, SLACK, Endpoint, HttpReply, UpstreamClient
from agl_server.testing import until

from .server_aids import GOOD

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Policy: 3\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nx-policy: 3\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
AFTER_AN_INTERIM_ONE = b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN
TO_THE_END = b"HTTP/1.1 200 OK\r\nX-Policy: 3\r\n\r\nhello"
LAST = PLAIN.replace(b"X-Policy", b"Connection: close\r\nX-Policy")
OLDER = PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0")
Piece: TypeAlias = bytes | asyncio.Event | None


@dataclass
class RawServer:
    """Answers each request with the next pieces of its script: bytes, None to close, or an event to wait for."""

    port: int = 0
    connections: int = 0
    closed: int = 0
    sent: int = 0
    requests: list[bytes] = field(default_factory=list)
    script: list[list[Piece]] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.script.pop(0) if self.script else [PLAIN]:
                    if piece is None:
                        writer.close()
                        return
                    if isinstance(piece, asyncio.Event):
                        await piece.wait()
                        continue
                    writer.write(piece)
                    await writer.drain()
                    self.sent += 1
                    await asyncio.sleep(0)
        self.closed += 1
        writer.close()


@contextlib.asynccontextmanager
async def raw_server(*script: list[Piece], idle: float = 60.0) -> AsyncIterator[tuple[RawServer, Endpoint]]:
    """A server that follows a script, and connections to it."""
    server = RawServer(script=list(script))
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    url = f"http://user@127.0.0.1:{server.port}/v1/chat?x=1"
    endpoint = Endpoint(url, {"Authorization": "Bearer k"}, timeout=60, connect=10, idle=idle)
    try:
        yield server, endpoint
    finally:
        endpoint.close()
        listening.close()


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Policy: 3\r\n"
STREAM = STREAM_HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"


async def read(endpoint: Endpoint) -> HttpReply:
    """A reply that was asked for as it comes, put together."""
    reply = await endpoint.post({}, b"", streamed=True)
    return reply if reply.parts is None else replace(reply, body=b"".join([part async for part in reply.parts]))


def shown(reply: HttpReply) -> tuple[int, str | None, bytes]:
    return reply.status, reply.headers.get("x-policy"), reply.body


async def test_the_request_is_what_was_asked_for() -> None:
    async with raw_server() as (server, endpoint):
        await endpoint.post({"x-agl-rollout": "r\N{LATIN SMALL LETTER E WITH ACUTE}/0"}, b'{"a": 1}')
        (request,) = server.requests
    head, _, body = request.partition(b"\r\n\r\n")
    first, *headers = head.decode().split("\r\n")
    assert (first, body) == ("POST /v1/chat?x=1 HTTP/1.1", b'{"a": 1}')
    assert sorted(headers) == sorted(
        [f"Host: 127.0.0.1:{server.port}", "Authorization: Bearer k", "x-agl-rollout: ré/0", "Content-Length: 8"]
    )


async def test_a_header_cannot_begin_another_one() -> None:
    async with raw_server() as (server, endpoint):
        for value in ("a\r\nb: c", "a\nb: c", "a\rb: c"):
            with pytest.raises(ValueError, match="line break"):
                await endpoint.post({"x-agl-rollout": value}, b"")
        assert server.requests == []


@settings(max_examples=2 * settings.default.max_examples)
@given(
    st.sampled_from(
        [PLAIN, CHUNKED, AFTER_AN_INTERIM_ONE, OLDER, LAST, TO_THE_END, STREAM, STREAM.replace(b"1.1", b"1.0", 1)]
    ),
    st.booleans(),
    st.data(),
)
def test_a_reply_may_come_in_any_pieces(sent: bytes, streamed: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sent) - 1), max_size=6)))
    pieces = [sent[start:end] for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    ended: list[Piece] = [None] if sent == TO_THE_END else []

    async def talk() -> None:
        async with raw_server([*pieces, *ended]) as (server, endpoint):
            first = await (read(endpoint) if streamed else endpoint.post({}, b""))
            assert shown(first) == shown(await endpoint.post({}, b"")) == (200, "3", b"hello")
            assert server.connections == (2 if sent in (LAST, TO_THE_END) or b"HTTP/1.0" in sent else 1)

    asyncio.run(talk())


@pytest.mark.parametrize("pieces", [[STREAM[:-5], None], [STREAM[:-5], b"nonsense\r\n"]])
async def test_a_stream_that_breaks_off_is_an_error_after_what_came(pieces: list[Piece]) -> None:
    async with raw_server(pieces) as (server, endpoint):
        reply = await endpoint.post({}, b"", streamed=True)
        assert await anext(reply.parts) == b"hello"
        with pytest.raises(ConnectionError):
            [part async for part in reply.parts]
        assert shown(await read(endpoint)) == (200, "3", b"hello")
        assert server.connections == 2


async def test_a_stream_that_is_not_read_to_its_end_closes_the_connection() -> None:
    release = asyncio.Event()
    async with raw_server([STREAM[:-5], release, STREAM[-5:]]) as (server, endpoint):
        reply = await endpoint.post({}, b"", streamed=True)
        async with contextlib.aclosing(reply.parts):
            assert await anext(reply.parts)
        release.set()
        assert shown(await read(endpoint)) == (200, "3", b"hello")
        assert server.connections == 2


async def test_a_server_waits_for_a_slow_reader() -> None:
    """A client that does not read must not fill the memory."""
    size = 64 * MAX_UNREAD
    async with raw_server([STREAM_HEAD + f"Content-Length: {size}\r\n\r\n".encode(), bytes(size)]) as (
        server,
        endpoint,
    ):
        reply = await endpoint.post({}, b"", streamed=True)
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert server.sent == 1
        assert sum([len(part) async for part in reply.parts]) == size


BROKEN: list[list[Piece]] = [
    [None],
    [PLAIN[:10], None],
    [PLAIN[:-1], None],
    [CHUNKED[:-5], None],
    [b"SSH-2.0-OpenSSH\r\n", None],
    [b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n"],
]


@pytest.mark.parametrize("pieces", BROKEN)
async def test_a_reply_that_does_not_come_whole_is_an_error(pieces: list[Piece]) -> None:
    async with raw_server(pieces) as (server, endpoint):
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(endpoint.post({}, b""), 10)
        assert shown(await endpoint.post({}, b"")) == (200, "3", b"hello")
        assert server.connections == 2


async def test_requests_at_once_have_connections_of_their_own_and_later_ones_share_them() -> None:
    async with raw_server() as (server, endpoint):
        await asyncio.gather(*(endpoint.post({}, b"") for _ in range(8)))
        assert server.connections == 8
        await asyncio.gather(*(endpoint.post({}, b"") for _ in range(8)))
        assert server.connections == 8
        endpoint.close()
        await until(lambda: server.closed == 8)


async def test_a_connection_that_was_idle_for_long_is_not_used_again() -> None:
    async with raw_server(idle=0.0) as (server, endpoint):
        for _ in range(3):
            await endpoint.post({}, b"")
        assert server.connections == 3


async def test_a_connection_that_the_server_closed_or_spoke_on_is_not_used_again() -> None:
    async with raw_server([PLAIN, None], [PLAIN, PLAIN]) as (server, endpoint):
        for _ in range(3):
            assert shown(await endpoint.post({}, b"")) == (200, "3", b"hello")
            for _ in range(20):  # Turns of the loop, in which the rest arrives however slow the machine is.
                await asyncio.sleep(0.005)
        assert server.connections == 3


async def test_a_cancelled_request_leaves_its_connection_to_nobody() -> None:
    async with raw_server([PLAIN[:-1]]) as (server, endpoint):
        asking = asyncio.create_task(endpoint.post({}, b""))
        await until(lambda: server.requests)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: server.closed == 1)
        assert shown(await endpoint.post({}, b"")) == (200, "3", b"hello")
        assert server.connections == 2


async def test_what_is_in_flight_ends_after_the_endpoint_was_closed() -> None:
    release = asyncio.Event()
    async with raw_server([release, PLAIN]) as (server, endpoint):
        asking = asyncio.create_task(endpoint.post({}, b""))
        await until(lambda: server.requests)
        endpoint.close()
        release.set()
        assert shown(await asking) == (200, "3", b"hello")
        await until(lambda: server.closed == 1)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of 127.0.0.1, signed by itself, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "upstream")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path / "upstream.pem"
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    file.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()) + signed.public_bytes(encoding))
    return file


async def test_an_upstream_over_tls_is_believed_only_with_a_known_certificate(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    app = web.Application()
    app.router.add_post("/", answer)
    async with served(app, ssl_context=context) as url:
        with pytest.raises(ssl.SSLCertVerificationError):
            await Endpoint(f"{url}/", {}, timeout=60, connect=10, idle=1).post({}, b"hello")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        endpoint = Endpoint(f"{url}/", {}, timeout=60, connect=10, idle=1)
        for _ in range(2):
            assert (await endpoint.post({}, b"hello" * 100_000)).body == b"hello" * 100_000
        endpoint.close()


@contextlib.asynccontextmanager
async def two_servers() -> AsyncIterator[tuple[UpstreamClient, ScriptedUpstream, ScriptedUpstream]]:
    """A client of two model servers."""
    async with ScriptedUpstream() as first, ScriptedUpstream() as second:
        client = client_of(first.url, second.url)
        yield client, first, second
        client.close()


def client_of(*urls: str, clock: Callable[[], float] = time.monotonic) -> UpstreamClient:
    return UpstreamClient(Upstream(urls, {"default": "m"}, "key"), 10, clock)


async def test_a_rollout_leaves_a_server_only_when_it_is_overloaded() -> None:
    release = asyncio.Event()
    async with two_servers() as (client, first, second):
        for server in (first, second):
            server.script(*(Hold(release=release) for _ in range(SLACK + 2)))
        asking = [asyncio.create_task(client.complete(GOOD, AttemptKey("mine", 0))) for _ in range(SLACK + 2)]
        await until(lambda: len(first.received) + len(second.received) == SLACK + 2)
        assert {len(first.received), len(second.received)} == {SLACK + 1, 1}
        release.set()
        await asyncio.gather(*asking)


async def test_a_model_server_hears_that_a_rollout_was_with_another_one_before() -> None:
    async with two_servers() as (client, first, second):
        key = AttemptKey("mine", 0)
        await client.complete(GOOD, key)
        home, other = (first, second) if first.received else (second, first)
        await client.complete(GOOD, key)
        home.script(Drop())
        await client.complete(GOOD, key)
        await client.complete(GOOD, key)
        await client.complete(GOOD, AttemptKey("another", 0))
        assert not any(HEADER_MOVED in received.headers for received in home.received)
        mine = [received for received in other.received if received.headers[HEADER_ROLLOUT] == "mine/0"]
        assert [HEADER_MOVED in received.headers for received in mine] == [True, True]
        assert not any(HEADER_MOVED in r.headers for r in other.received if r not in mine)


async def test_a_server_that_is_away_is_left_alone_for_a_while() -> None:
    clock = Mock(return_value=0.0)
    async with ScriptedUpstream() as there:
        client = client_of("http://127.0.0.1:9/v1", there.url, clock=clock)
        for number in range(20):
            await client.complete(GOOD, AttemptKey(str(number), 0))
        assert {client.server_of(str(number)) for number in range(40)} == {there.url}
        clock.return_value = REST
        assert len({client.server_of(str(number)) for number in range(40, 80)}) == 2
        client.close()


@pytest.mark.parametrize("failure", [Drop(), Fail(503)])
async def test_a_reply_that_breaks_off_is_sampled_at_the_other_server(failure: Any) -> None:
    async with two_servers() as (client, first, second):
        first.script(failure)
        await asyncio.gather(*(client.complete(GOOD, AttemptKey(str(number), 0)) for number in range(2)))
        assert (len(first.received), len(second.received)) == (1, 2)


async def test_what_a_server_refuses_is_asked_of_no_other() -> None:
    async with two_servers() as (client, first, second):
        for server in (first, second):
            server.script(Fail(400), Fail(500))
        for _ in range(2):
            with pytest.raises(ApiError):
                await client.complete(GOOD, AttemptKey("mine", 0))
        assert {len(first.received), len(second.received)} == {0, 2}
