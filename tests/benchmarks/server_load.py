"""A client of the Lightning Server that costs next to nothing itself: agents and workers of the benchmarks."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
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
"""What OpenAI's client sends with each request."""


class AnsweredWithError(Exception):
    """A status other than 200, or a connection that was closed under a request."""


class Connection(asyncio.Protocol):
    """One connection that is kept, with one request in flight."""

    @classmethod
    async def to(cls, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._received = cast(asyncio.Transport, transport), b""
        self._reply: asyncio.Future[bytes] | None = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        start = self._received.find(b"\r\n\r\n") + 4
        length = _LENGTH.search(self._received, 0, start) if start > 3 else None
        if length is None or len(self._received) < start + int(length[1]) or self._reply is None:
            return
        payload, failed = self._received[start:], self._received[9:12] != b"200"
        self._received = b""
        if failed:
            self._reply.set_exception(AnsweredWithError(payload.decode()))
        else:
            self._reply.set_result(payload)

    def connection_lost(self, error: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(AnsweredWithError(f"The connection was closed ({error})."))

    def close(self) -> None:
        self._transport.close()

    def ask(self, request: bytes) -> asyncio.Future[bytes]:
        """The body of the reply."""
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._reply


def post(path: str, key: str, body: Any) -> bytes:
    """A request as OpenAI's client would send it."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n{_SDK_HEADERS}"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def chat(turn: int, question: str) -> dict[str, Any]:
    """The request of an agent's turn, 0 the first: it repeats all that was said and what its tool answered."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent that plans journeys. Use the timetable, and answer briefly."},
        {"role": "user", "content": f"When does my train leave, and can I still take it? Question {question}"},
    ]
    for place in range(turn):
        asked = {"name": "timetable", "arguments": json.dumps({"station": f"Station {place}"})}
        call = {"id": f"call_{question}_{place}", "type": "function", "function": asked}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        found = f"Station {place}: 09:30 platform 4, 10:15 platform 2, 11:30 platform 4 ({question})"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
    station = {"type": "object", "properties": {"station": {"type": "string"}}, "required": ["station"]}
    tool = {"name": "timetable", "description": "The departures of a station.", "parameters": station}
    return {
        "model": "default",
        "messages": messages,
        "tools": [{"type": "function", "function": tool}],
        "temperature": 1.0,
    }


@dataclass
class Load:
    """What came of a number of requests at once."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    """Of each request that was answered, in seconds."""
    rollouts: int = 0

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds


class Client:
    """So many connections, and what is done with all of them at once."""

    def __init__(self, port: int, key: str) -> None:
        self._port, self._key = port, key

    async def at_once(
        self, n_connections: int, seconds: float, work: Callable[[Connection, Worker], Awaitable[None]]
    ) -> Load:
        """Do `work` again and again on each connection, for this long. AnsweredWithError if one request is."""
        load = Load()
        connections = [await Connection.to(self._port) for _ in range(n_connections)]
        started = time.perf_counter()

        async def repeat(place: int, connection: Connection) -> None:
            worker = Worker(f"worker-{place}", self._key, load)
            while time.perf_counter() < started + seconds:
                await work(connection, worker)

        await asyncio.gather(*(repeat(place, each) for place, each in enumerate(connections)))
        load.seconds = time.perf_counter() - started
        for each in connections:
            each.close()
        return load


@dataclass(frozen=True)
class Worker:
    """One worker with one connection; it notes how long its agents' calls took."""

    name: str
    key: str
    load: Load

    async def ask(self, connection: Connection, path: str, body: Any, key: str | None = None) -> Any:
        return json.loads(await connection.ask(post(f"/agl/v1/{path}", key or self.key, body)))

    async def lease(self, connection: Connection, capacity: int = 1) -> list[dict[str, Any]]:
        reply = await self.ask(connection, "leases", {"worker": self.name, "capacity": capacity, "wait": 10})
        return list(reply["leases"])

    async def close(self, connection: Connection, lease: dict[str, Any]) -> None:
        """Report that the agent finished."""
        place = f"rollouts/{lease['rollout']}/attempts/{lease['attempt']}/close"
        report = {"ending": "finished", "result": "09:30", "rewards": [{"value": 1.0}]}
        await self.ask(connection, place, report, lease["secret"])
        self.load.rollouts += 1

    async def call(self, connection: Connection, request: bytes) -> None:
        """One call of an agent."""
        started = time.perf_counter()
        await connection.ask(request)
        self.load.latencies.append(time.perf_counter() - started)


def calls_of(lease: dict[str, Any], turns: Iterable[int]) -> list[bytes]:
    """An agent's requests for these turns."""
    path = f"{lease['path']}/v1/chat/completions"
    return [post(path, lease["key"], chat(turn, lease["rollout"])) for turn in turns]
