"""Replies as bytes on a connection."""

from __future__ import annotations

import asyncio

import httptools
import httpx
import orjson
import pytest

from agl_core.server.http.event_loop import run
from agl_core.server.http.protocol import CorkedTransport
from agl_core.testing.server import Stack

from ..posting import key_of_url

BODY = orjson.dumps({"model": "default", "messages": [{"role": "user", "content": "hello"}]})


def request(stack: Stack, path: str, *lines: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key_of_url(stack, path)}", *lines]
    return "\r\n".join([*head, f"Content-Length: {len(BODY)}", "", ""]).encode() + BODY


async def connect(stack: Stack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", httpx.URL(stack.server.base_url).port)


class Replies:
    """What a peer understands of what it reads."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self._parser = httptools.HttpResponseParser(self)

    def on_message_complete(self) -> None:
        self.statuses.append(self._parser.get_status_code())

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)


@pytest.mark.parametrize("path", ["/rollout/{}/attempt/{}/v1/chat/completions", "/v1/nothing"])
async def test_a_reply_comes_in_one_piece(stack: Stack, path: str) -> None:
    key = await stack.lease()
    reader, writer = await connect(stack)
    for _ in range(3):
        writer.write(request(stack, path.format(*key)))
        replies = Replies()
        replies.feed(await reader.read(1 << 20))
        assert len(replies.statuses) == 1, "its head alone woke the client up"
    writer.close()


async def test_requests_sent_at_once_are_answered_in_their_order(stack: Stack) -> None:
    key = await stack.lease()
    reader, writer = await connect(stack)
    path = f"/rollout/{key.rollout}/attempt/{key.attempt}/v1/chat/completions"
    writer.write(request(stack, path) + request(stack, "/v1/nothing") + request(stack, path, "Connection: close"))
    replies = Replies()
    replies.feed(await reader.read())
    assert replies.statuses == [200, 404, 200]
    writer.close()


async def test_a_connection_that_is_to_close_closes_after_the_reply(stack: Stack) -> None:
    reader, writer = await connect(stack)
    writer.write(request(stack, "/v1/chat/completions", "Connection: close"))
    replies = Replies()
    replies.feed(await reader.read())
    assert replies.statuses == [401], "of no rollout"
    writer.close()


async def test_a_model_call_is_a_post(stack: Stack) -> None:
    key = await stack.lease()
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {stack.key(key)}"}) as client:
        for url in (f"{stack.url(key)}/chat/completions", f"{stack.url()}/messages"):
            assert (await client.get(url)).status_code == 405
        assert (await client.post(f"{stack.url()}/chat/completions/x", content=BODY)).status_code == 404
        assert (await client.post(f"{stack.server.base_url}/x/v1/messages", content=BODY)).status_code == 404


def test_a_reply_to_a_client_that_hung_up_is_dropped() -> None:
    problems: list[object] = []

    async def reply_too_late() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context))
        gone = asyncio.Event()

        class Peer(asyncio.Protocol):
            def connection_lost(self, error: Exception | None) -> None:
                gone.set()

        async with await loop.create_server(asyncio.Protocol, "127.0.0.1", 0) as listening:
            transport, _ = await loop.create_connection(Peer, *listening.sockets[0].getsockname())
            corked = CorkedTransport(transport)
            transport.abort()
            await gone.wait()
            corked.write(b"HTTP/1.1 200 OK")
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    run(reply_too_late())
    assert problems == []
