"""A reply is of one policy version from its first token to its last, and says which."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

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
        self.calls: list[object] = []

        async def chat(request: Request) -> JSONResponse:
            self.calls.append(await request.json())
            self.entered.set()
            await self.permits.acquire()
            return JSONResponse({"call": len(self.calls)})

        async def read(request: Request) -> JSONResponse:
            return JSONResponse({})

        posts = [Route(path, chat, methods=["POST"]) for path in SAMPLING]
        reads = [Route(path, read, methods=["GET"]) for path in ("/metrics", "/health", "/v1/models", "/version")]
        app = Starlette(routes=[*posts, *reads])
        transport = httpx.ASGITransport(GatedApp(app, lambda scope: self.gate, KEY))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server")
        self.key = {"authorization": f"Bearer {KEY}"}

    def open(self, version: int) -> None:
        """New weights are there."""
        self.gate.version = version
        self.gate.open()

    def ask(self, path: str = "/v1/chat/completions") -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.client.post(path, json={"text": "x" * 100_000}, headers=self.key))


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
    server.gate.close()
    server.permits.release()  # The old weights finish it, or it is aborted: it counts for nothing.
    await asyncio.sleep(0.05)
    assert not question.done()
    server.permits.release()
    server.open(5)
    reply = await question
    assert reply.headers[HEADER_POLICY] == "5"
    assert reply.json() == {"call": 2}
    assert server.calls[0] == server.calls[1], "the same request, whole"


async def test_a_second_exchange_during_the_second_try_is_noticed_too(server: Server) -> None:
    server.open(1)
    question = server.ask()
    await server.entered.wait()
    for version in (2, 3):
        server.entered.clear()
        server.gate.close()
        server.open(version)
        server.permits.release()
        await server.entered.wait()
    server.permits.release()
    assert (await question).headers[HEADER_POLICY] == "3"


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
