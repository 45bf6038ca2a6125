"""Both ends of a measured call, each in a process of its own.

`python server_peers.py upstream [CORE]` is a model server without a model. It prints its port, and answers every POST
with one chat completion in vLLM's shape: 4.8 KB, 60 prompt ids, 40 response ids with their log-probabilities. A number
in the text differs from reply to reply. A reply that is streamed has the same tokens, the first at once and then one
each `PER_TOKEN` seconds.

`python server_peers.py agent KIND [CORE]` is an agent whose model server is in its environment. For each number that it
reads, it makes so many calls, one after the other, and prints their seconds as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from server_load import LENGTH, STREAM, chat, pin

PROMPT_IDS, RESPONSE_IDS = 60, 40
SAID = "The train leaves at half past nine, so the answer to question number ######## is that you can still take it."
_NUMBER = b"########"
PER_TOKEN = 0.025
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def completion() -> dict[str, Any]:
    logprobs = [
        {"token": f" word{position:02}", "logprob": -0.01 * position, "bytes": list(b"word"), "top_logprobs": []}
        for position in range(RESPONSE_IDS)
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


def stream() -> list[bytes]:
    """The same reply as HTTP chunks, one for each token and one for the end."""
    whole = completion()
    [choice], head = (
        whole["choices"],
        {"id": whole["id"], "object": "chat.completion.chunk", "created": 1, "model": "m"},
    )
    choices = [
        {"index": 0, "delta": {"content": entry["token"]}, "token_ids": [token], "logprobs": {"content": [entry]}}
        for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True)
    ]
    chunks = [json.dumps({**head, "choices": [choice]}) for choice in choices]
    chunks[0] = json.dumps({**head, "prompt_token_ids": whole["prompt_token_ids"], "choices": [choices[0]]})
    ended = {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": whole["usage"]}
    events = [f"data: {chunk}\n\n" for chunk in chunks] + [f"data: {json.dumps(ended)}\n\ndata: [DONE]\n\n"]
    return [b"%x\r\n%b\r\n" % (len(event), event.encode()) for event in events]


class UpstreamConnection(asyncio.Protocol):
    def __init__(self, before: bytes, after: bytes, numbers: Iterator[int]) -> None:
        self._before, self._after, self._numbers = before, after, numbers
        self._received, self._n_bytes = b"", len(before) + len(_NUMBER) + len(after)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        first, *others, last = stream()
        self._stream = [head + first, *others, last + b"0\r\n\r\n"]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n") + 4) > 3:
            length = LENGTH.search(self._received, 0, end)
            end += int(length[1]) if length else 0
            if len(self._received) < end:
                return
            request, self._received = self._received[:end], self._received[end:]
            if STREAM in request:
                self._transport.write(self._stream[0])
                for number, part in enumerate(self._stream[1:], 1):
                    asyncio.get_running_loop().call_later(number * PER_TOKEN, self._transport.write, part)
            else:
                head = _HEAD % self._n_bytes
                self._transport.write(b"%b%b%08d%b" % (head, self._before, next(self._numbers), self._after))


async def serve() -> None:
    body = json.dumps(completion()).encode()
    before, after = body.split(_NUMBER)
    numbers, loop = itertools.count(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: UpstreamConnection(before, after, numbers), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def openai_client() -> Callable[[], Any]:
    """A request of OpenAI's client, with the conversation of an agent's sixth turn."""
    import openai

    client, request = openai.OpenAI(), chat(5, "0")
    return lambda: client.chat.completions.create(**request)


def langchain_agent() -> Callable[[], Any]:
    """A run of a LangChain agent, which makes one call."""
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def timetable(station: str) -> str:
        """The departures of a station."""
        return f"{station}: 09:30 platform 4"

    system, question = (message["content"] for message in chat(0, "0")["messages"])
    agent = create_agent(ChatOpenAI(model="default"), [timetable], system_prompt=system, name="planner")
    return lambda: agent.invoke({"messages": [("user", question)]})


AGENTS: Mapping[str, Callable[[], Callable[[], Any]]] = {
    "OpenAI's client": openai_client,
    "a LangChain agent": langchain_agent,
}


def call_again_and_again(call: Callable[[], Any]) -> None:
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["upstream", *core]:
            from agl_server.http.listening import run

            pin(core)
            run(serve())
        case ["agent", kind, *core]:
            pin(core)
            call_again_and_again(AGENTS[kind]())
