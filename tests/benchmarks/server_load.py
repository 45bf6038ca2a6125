"""Agents and workers that cost next to nothing themselves: the load of the server's benchmark."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

TURNS = 6
"""Calls of an agent whose conversation grows."""
STREAM = b'"stream":true'
"""In the body of a request for a stream."""
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_SDK_HEADERS = """Accept: application/json
Accept-Encoding: gzip, deflate
Content-Type: application/json
User-Agent: AsyncOpenAI/Python 3.52.0
X-Stainless-Lang: python
X-Stainless-Package-Version: 3.52.0
X-Stainless-OS: Linux
X-Stainless-Arch: x64
X-Stainless-Runtime: CPython
X-Stainless-Runtime-Version: 3.11.7
X-Stainless-Async: async:asyncio
x-stainless-retry-count: 0
x-stainless-read-timeout: 600
""".replace("\n", "\r\n")
"""Headers that OpenAI's client sends with each request."""


def _cores() -> tuple[list[str], list[str]]:
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return ([], []) if len(available) < 2 else ([str(available[0])], [str(available[1])])


SERVER_CORE, OTHER_CORE = _cores()
"""One core for the server and one for all others; empty where there is one core, or no pinning.

Read once, at the import: a process that is pinned, and its children, see their own core only.
"""


def pin(core: Sequence[str]) -> None:
    if core:
        os.sched_setaffinity(0, {int(number) for number in core})


def chat(turn: int, question: str) -> dict[str, Any]:
    """The request of an agent's turn, 0 the first: it repeats the conversation with its tool results."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent that plans journeys. Use the timetable, and answer briefly."},
        {"role": "user", "content": f"When does my train leave, and can I still take it? Question {question}"},
    ]
    for number in range(turn):
        function = {"name": "timetable", "arguments": json.dumps({"station": f"Station {number}"})}
        call = {"id": f"call_{question}_{number}", "type": "function", "function": function}
        result = f"Station {number}: 09:30 platform 4, 10:15 platform 2, 11:30 platform 4 ({question})"
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    station = {"type": "object", "properties": {"station": {"type": "string"}}, "required": ["station"]}
    tool = {"name": "timetable", "description": "The departures of a station.", "parameters": station}
    return {
        "model": "default",
        "messages": messages,
        "tools": [{"type": "function", "function": tool}],
        "temperature": 1.0,
    }


def post(path: str, key: str, body: Any) -> bytes:
    content = json.dumps(body, separators=(",", ":")).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n{_SDK_HEADERS}"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def requests_of(lease: dict[str, Any], turns: int, **more: Any) -> list[bytes]:
    """The calls of a leased rollout's agent, one for each turn; `more` fields are in each."""
    path = f"{lease['path']}/v1/chat/completions"
    return [post(path, lease["key"], {**chat(turn, lease["rollout"]), **more}) for turn in range(turns)]


class AnsweredWithError(Exception):
    """A status other than 200, or a connection that was closed under a request."""


class Connection(asyncio.Protocol):
    """One kept connection, with one request in flight."""

    @classmethod
    async def to(cls, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._received = cast(asyncio.Transport, transport), b""
        self.first = 0.0
        """When the first text of a stream came."""
        self._reply: asyncio.Future[bytes] | None = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        if b"text/event-stream" in self._received[:400]:
            self._stream_received()
            return
        start = self._received.find(b"\r\n\r\n") + 4
        length = LENGTH.search(self._received, 0, start) if start > 3 else None
        if length is None or len(self._received) < start + int(length[1]) or self._reply is None:
            return
        payload, failed = self._received[start:], self._received[9:12] != b"200"
        self._received = b""
        if failed:
            self._reply.set_exception(AnsweredWithError(payload.decode()))
        else:
            self._reply.set_result(payload)

    def _stream_received(self) -> None:
        if not self.first and b" word" in self._received:
            self.first = time.perf_counter()
        if self._reply is not None and self._received.endswith(b"\r\n0\r\n\r\n"):
            payload, self._received = self._received, b""
            if b"[DONE]" in payload:
                self._reply.set_result(payload)
            else:
                self._reply.set_exception(AnsweredWithError(payload.decode()))

    def connection_lost(self, error: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(AnsweredWithError(f"The connection was closed ({error})."))

    def close(self) -> None:
        self._transport.close()

    def send(self, request: bytes) -> asyncio.Future[bytes]:
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._reply


@dataclass
class Load:
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    """Seconds of each agent's call."""
    rollouts: int = 0

    @property
    def calls_per_second(self) -> float:
        return len(self.latencies) / self.seconds


@dataclass(frozen=True)
class Worker:
    name: str
    key: str
    connection: Connection
    load: Load

    async def lease(self, capacity: int = 1) -> list[dict[str, Any]]:
        request = post("/agl/v1/leases", self.key, {"worker": self.name, "capacity": capacity, "wait": 10})
        return list(json.loads(await self.connection.send(request))["leases"])

    async def close(self, lease: dict[str, Any]) -> None:
        path = f"/agl/v1/rollouts/{lease['rollout']}/attempts/{lease['attempt']}/close"
        report = {"ending": "finished", "result": "09:30", "rewards": [{"value": 1.0}]}
        await self.connection.send(post(path, lease["secret"], report))
        self.load.rollouts += 1

    async def call(self, request: bytes) -> None:
        """One call of an agent; of a stream the time to the first text is measured."""
        started, self.connection.first = time.perf_counter(), 0.0
        await self.connection.send(request)
        self.load.latencies.append((self.connection.first or time.perf_counter()) - started)


async def at_once(port: int, key: str, n: int, seconds: float, work: Callable[[Worker], Awaitable[None]]) -> Load:
    """Do `work` on each of `n` connections, and again until the time is over. AnsweredWithError if one request is."""
    load = Load()
    workers = [Worker(f"worker-{number}", key, await Connection.to(port), load) for number in range(n)]
    started = time.perf_counter()

    async def repeat(worker: Worker) -> None:
        await work(worker)
        while time.perf_counter() < started + seconds:
            await work(worker)

    await asyncio.gather(*map(repeat, workers))
    load.seconds = time.perf_counter() - started
    for worker in workers:
        worker.connection.close()
    return load
