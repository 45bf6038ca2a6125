"""A reply is of one policy version from its first token to its last, and says which."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agl_core.wire.headers import HEADER_POLICY
from agl_verl.serving.gate import Gate, GatedApp


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

        async def metrics(request: Request) -> JSONResponse:
            return JSONResponse({})

        app = Starlette(
            routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/metrics", metrics, methods=["GET"])]
        )
        transport = httpx.ASGITransport(GatedApp(app, lambda scope: self.gate))  # type: ignore[arg-type]
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server")

    def open(self, version: int) -> None:
        """New weights are there."""
        self.gate.version = version
        self.gate.open()

    def ask(self) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.client.post("/v1/chat/completions", json={"text": "x" * 100_000}))


@pytest.fixture
def server() -> Server:
    return Server()


async def test_nothing_is_sampled_before_the_first_weights_are_there(server: Server) -> None:
    server.permits.release()
    asked = server.ask()
    await asyncio.sleep(0.05)
    assert server.calls == []
    assert (await server.client.get("/metrics")).status_code == 200, "everything else goes by"
    server.open(1)
    reply = await asked
    assert reply.headers[HEADER_POLICY] == "1"


async def test_a_reply_that_was_begun_before_an_exchange_is_sampled_anew_after_it(server: Server) -> None:
    server.open(4)
    asked = server.ask()
    await server.entered.wait()
    server.gate.close()
    server.permits.release()  # The old weights finish it, or it is aborted: it counts for nothing.
    await asyncio.sleep(0.05)
    assert not asked.done()
    server.permits.release()
    server.open(5)
    reply = await asked
    assert reply.headers[HEADER_POLICY] == "5"
    assert reply.json() == {"call": 2}
    assert server.calls[0] == server.calls[1], "the same request, whole"


async def test_a_second_exchange_during_the_second_try_is_noticed_too(server: Server) -> None:
    server.open(1)
    asked = server.ask()
    await server.entered.wait()
    for version in (2, 3):
        server.entered.clear()
        server.gate.close()
        server.open(version)
        server.permits.release()
        await server.entered.wait()
    server.permits.release()
    assert (await asked).headers[HEADER_POLICY] == "3"


async def test_an_undisturbed_reply_is_sampled_once(server: Server) -> None:
    server.open(7)
    server.permits.release()
    reply = await server.ask()
    assert reply.headers[HEADER_POLICY] == "7"
    assert len(server.calls) == 1


async def test_an_update_that_left_the_weights_as_they_are_has_a_number_of_its_own(server: Server) -> None:
    server.open(1)
    server.gate.version = 2
    server.permits.release()
    assert (await server.ask()).headers[HEADER_POLICY] == "2"
