"""A reply is of one policy version from its first token to its last, and says which."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from agl_chat.backends import client_of
from agl_core.capture.requests import HEADER_POLICY
from agl_verl.gate import Gate, GatedApp

KEY = "the-run's-key"
SAMPLING = ("/v1/chat/completions", "/v1/completions", "/invocations", "/tokenize", "/inference/v1/generate")
"""Some of vLLM's routes; it asks for the key below /v1 and /inference alone, if at all."""


class Server:
    """A model server that takes as long as the test says, behind a gate."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.entered = asyncio.Event()
        self.permits = asyncio.Semaphore(0)
        """One for each call that may finish."""
        self.turns = defaultdict[int, asyncio.Semaphore](lambda: asyncio.Semaphore(0))
        """By the number of its call, one for each event of a stream."""
        self.calls: list[object] = []

        async def chat(request: Request) -> JSONResponse:
            self.calls.append(await request.json())
            self.entered.set()
            await self.permits.acquire()
            return JSONResponse({"call": len(self.calls)})

        async def stream(request: Request) -> StreamingResponse:
            call = len(self.calls) + 1

            async def events() -> AsyncIterator[str]:
                for number in range(3):
                    await self.turns[call].acquire()
                    yield f"data: {call} {number}\n\n"
                yield "data: [DONE]\n\n"

            self.calls.append(await request.json())
            self.entered.set()
            return StreamingResponse(events(), media_type="text/event-stream")

        async def read(request: Request) -> JSONResponse:
            return JSONResponse({})

        posts = [Route(path, chat, methods=["POST"]) for path in SAMPLING]
        posts.append(Route("/stream", stream, methods=["POST"]))
        reads = [Route(path, read, methods=["GET"]) for path in ("/metrics", "/health", "/v1/models", "/version")]
        app = Starlette(routes=[*posts, *reads])
        gated = GatedApp(app, lambda scope: self.gate, KEY)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(gated), base_url="http://server")
        self.key = {"authorization": f"Bearer {KEY}"}
        self.streaming = client_of(gated, KEY)
        self.came = asyncio.Event()
        """An event of a stream has come."""

    def open(self, version: int, policy: str = "default") -> None:
        """New weights are there."""
        self.gate.versions[policy] = version
        self.gate.open()

    def ask(self, path: str = "/v1/chat/completions", model: str | None = None) -> asyncio.Task[httpx.Response]:
        body = {"text": "x" * 100_000, "model": model}
        return asyncio.create_task(self.client.post(path, json=body, headers=self.key))

    async def follow(self) -> tuple[str, list[str]]:
        """The version and the events of a stream."""
        events = []
        async with self.streaming.stream("POST", "/stream", json={}) as reply:
            async for line in reply.aiter_lines():
                if line:
                    events.append(line.removeprefix("data: "))
                    self.came.set()
        return reply.headers[HEADER_POLICY], events

    def send(self, call: int, events: int = 1) -> None:
        """Send so many events of a stream, as soon as it is asked for."""
        for _ in range(events):
            self.turns[call].release()


@pytest.fixture
def server() -> Server:
    return Server()


async def test_nothing_is_sampled_before_the_first_weights_are_there(server: Server) -> None:
    server.permits.release()
    question = server.ask()
    await asyncio.sleep(0.05)
    assert server.calls == []
    assert (await server.client.get("/metrics")).status_code == 200, "everything else goes by"
    server.open(1)
    reply = await question
    assert reply.headers[HEADER_POLICY] == "1"


async def test_a_reply_that_was_begun_before_an_exchange_is_sampled_anew_after_it(server: Server) -> None:
    server.open(4)
    question = server.ask()
    await server.entered.wait()
    await server.gate.close()
    server.permits.release()  # The old weights finish it, or it is aborted: it counts for nothing.
    await asyncio.sleep(0.05)
    assert not question.done()
    server.permits.release()
    server.open(5)
    reply = await question
    assert reply.headers[HEADER_POLICY] == "5"
    assert reply.json() == {"call": 2}
    assert server.calls[0] == server.calls[1], "the same request, whole"


async def test_a_reply_has_the_version_of_the_policy_that_was_asked(server: Server) -> None:
    server.open(4, "solver")
    server.open(7, "checker")
    for _ in range(3):
        server.permits.release()
    replies = [await server.ask(model=model) for model in ("solver", "checker", None)]
    assert [reply.headers[HEADER_POLICY] for reply in replies] == ["4", "7", "0"]


async def test_a_second_exchange_during_the_second_try_is_noticed_too(server: Server) -> None:
    server.open(1)
    question = server.ask()
    await server.entered.wait()
    for version in (2, 3):
        server.entered.clear()
        await server.gate.close()
        server.open(version)
        server.permits.release()
        await server.entered.wait()
    server.permits.release()
    assert (await question).headers[HEADER_POLICY] == "3"


def whole(call: int) -> list[str]:
    """The events of a stream."""
    return [*(f"{call} {number}" for number in range(3)), "[DONE]"]


async def test_a_stream_goes_out_as_it_comes_and_an_exchange_waits_for_its_end(server: Server) -> None:
    server.open(1)
    stream = asyncio.create_task(server.follow())
    server.send(1)
    await server.came.wait()
    closing = asyncio.create_task(server.gate.close(60))
    await asyncio.sleep(0.01)
    late = server.ask()
    await asyncio.sleep(0.01)
    assert not closing.done()
    server.send(1, 2)
    assert await stream == ("1", whole(1))
    await closing
    assert len(server.calls) == 1
    server.open(2)
    server.permits.release()
    assert (await late).headers[HEADER_POLICY] == "2"


async def test_a_stream_that_takes_too_long_ends_with_an_error(server: Server) -> None:
    server.open(1)
    stream = asyncio.create_task(server.follow())
    server.send(1)
    await server.came.wait()
    await server.gate.close(0.01)
    server.open(2)
    server.send(1, 2)
    version, (first, error) = await stream
    assert (version, first) == ("1", "1 0")
    assert "weights changed" in json.loads(error)["error"]["message"]
    assert len(server.calls) == 1
    server.send(2, 3)
    assert await server.follow() == ("2", whole(2))


@pytest.mark.parametrize("sent", [0, 1, 3])
async def test_a_stream_that_begins_at_a_closing_gate_is_of_one_version(server: Server, sent: int) -> None:
    """Another one holds the exchange up."""
    server.open(1)
    other = asyncio.create_task(server.follow())
    server.send(1)
    await server.came.wait()
    server.entered.clear()
    stream = asyncio.create_task(server.follow())
    await server.entered.wait()
    closing = asyncio.create_task(server.gate.close(60))
    await asyncio.sleep(0.01)
    server.send(2, sent)
    await asyncio.sleep(0.01)
    server.send(1, 2)
    assert await other == ("1", whole(1))
    await closing
    server.send(2, 3 - sent)
    server.open(2)
    server.send(3, 3)
    assert await stream == (("1", whole(2)) if sent == 3 else ("2", whole(3)))


async def test_a_client_that_leaves_its_stream_holds_no_exchange_up(server: Server) -> None:
    server.open(1)
    stream = asyncio.create_task(server.follow())
    server.send(1)
    await server.came.wait()
    stream.cancel()
    await asyncio.wait_for(server.gate.close(60), 10)


@pytest.mark.parametrize("path", SAMPLING)
async def test_every_route_that_samples_needs_the_key_and_waits_at_the_gate(server: Server, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"authorization": f"Basic {KEY}"}):
        refused = await server.client.post(path, json={}, headers=headers)
        assert refused.status_code == 401
        assert "key" in refused.json()["error"]["message"]
    question = server.ask(path)
    server.permits.release()
    server.open(3)
    reply = await question
    assert (reply.status_code, reply.headers[HEADER_POLICY]) == (200, "3")
    assert len(server.calls) == 1, "what was refused has reached nothing"


async def test_without_the_key_only_health_and_metrics_are_read(server: Server) -> None:
    for path, status in (("/health", 200), ("/metrics", 200), ("/v1/models", 401), ("/version", 401), ("/no", 401)):
        assert (await server.client.get(path)).status_code == status
    assert (await server.client.post("/health")).status_code == 401
    assert (await server.client.get("/v1/models", headers=server.key)).status_code == 200
    assert (await server.client.get("/v1/models", headers={"Authorization": f"bearer {KEY}"})).status_code == 200


async def test_no_websocket_is_opened(server: Server) -> None:
    sent: list[dict[str, object]] = []

    async def unreachable(*_: object) -> None:
        raise AssertionError

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    app = GatedApp(unreachable, lambda scope: server.gate, KEY)
    await app({"type": "websocket", "path": "/v1/realtime", "headers": []}, unreachable, send)  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["websocket.close"]
