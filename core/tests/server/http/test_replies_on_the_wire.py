"""Replies as bytes on a connection."""

from __future__ import annotations

import asyncio

import httptools
import httpx
import orjson

from agl_core.server.listening import run
from agl_core.testing.server import Stack, running_stack

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


def test_a_reply_comes_in_one_piece_from_the_loop_of_production() -> None:
    async def serve() -> None:
        async with running_stack() as stack:
            key = await stack.lease()
            reader, writer = await connect(stack)
            for _ in range(3):
                writer.write(request(stack, f"/rollout/{key.rollout}/attempt/{key.attempt}/v1/chat/completions"))
                replies = Replies()
                replies.feed(await reader.read(1 << 20))
                assert len(replies.statuses) == 1, "its head alone woke the client up"
            writer.close()

    run(serve())


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
