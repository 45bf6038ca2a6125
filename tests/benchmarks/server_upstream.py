"""A model server without a model, and as little else as a server can be: `python server_upstream.py [CORE]`.

Prints its port, and answers every POST with one chat completion in vLLM's shape: 4.8 KB, 60 prompt ids, 40 response
ids with their log-probabilities. Only a number in the text differs from reply to reply.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
from collections.abc import Iterator
from typing import Any, cast

from server_cores import pin

from agl_core.server.http.event_loop import run

PROMPT_IDS, RESPONSE_IDS = 60, 40
SAID = "The train leaves at half past nine, so the answer to question number ######## is that you can still take it."
_NUMBER = b"########"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


def completion() -> dict[str, Any]:
    """The reply."""
    logprobs = [
        {"token": f" word{place:02}", "logprob": -0.01 * place, "bytes": list(b"word"), "top_logprobs": []}
        for place in range(RESPONSE_IDS)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": SAID, "refusal": None, "tool_calls": [], "reasoning": None},
        "logprobs": {"content": logprobs},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": list(range(200, 200 + RESPONSE_IDS)),
    }
    usage = {"prompt_tokens": PROMPT_IDS, "completion_tokens": RESPONSE_IDS, "total_tokens": PROMPT_IDS + RESPONSE_IDS}
    return {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion",
        "created": 1_760_000_000,
        "model": "served",
        "choices": [choice],
        "usage": usage,
        "prompt_token_ids": list(range(100, 100 + PROMPT_IDS)),
    }


class Answering(asyncio.Protocol):
    """One connection."""

    def __init__(self, before: bytes, after: bytes, numbers: Iterator[int]) -> None:
        self._before, self._after, self._numbers = before, after, numbers
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n") + 4) > 3:
            length = _LENGTH.search(self._received, 0, end)
            end += int(length[1]) if length else 0
            if len(self._received) < end:
                return
            self._received = self._received[end:]
            self._transport.write(b"%b%08d%b" % (self._before, next(self._numbers), self._after))


async def serve() -> None:
    body = json.dumps(completion()).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    before, after = (head + body).split(_NUMBER)
    numbers = itertools.count()
    server = await asyncio.get_running_loop().create_server(lambda: Answering(before, after, numbers), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    pin(sys.argv[1:])
    run(serve())
