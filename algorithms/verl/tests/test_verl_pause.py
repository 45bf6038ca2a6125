"""A reply is of one policy version from its first token to its last, and says which."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from agl_chat.api import CHAT_COMPLETIONS, create_app
from agl_chat.backends import Generation, Request, Response, SampledToken
from agl_core.errors import EngineError
from agl_core.types import FinishReason
from agl_verl.pause import FrontApp, Gate, GatedBackend

KEY = "the-run's-key"
OTHERS = ("/v1/completions", "/invocations", "/tokenize", "/inference/v1/generate", "/version")
"""Some of vLLM's routes; it asks for the key below /v1 and /inference alone, if at all."""
PROMPT = np.array([5, 6], np.int32)


class Server:
    """A back end behind a gate; each of its responses is of three tokens, its number times ten and up."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.backend = GatedBackend(self, self.gate)
        self.turns = defaultdict[int, asyncio.Semaphore](lambda: asyncio.Semaphore(0))
        """By the number of its try, one for each token."""
        self.tries: list[Request] = []
        self.came = asyncio.Event()
        """Somebody has a token."""
        self.failing = False

    async def generate(self, request: Request) -> Generation:
        self.tries.append(request)
        number = len(self.tries)
        response = Response([SampledToken(0, token, 0.0) for token in ids_of(number)], FinishReason.STOP)
        for token in response.tokens:
            await self.turns[number].acquire()
            if self.failing:
                raise EngineError("aborted")
            if request.watch:
                request.watch(token)
            await asyncio.sleep(0)
        return Generation(request, (response,), 0, 2, 0)

    def open(self, version: int, policy: str = "") -> None:
        """New weights are there."""
        self.gate.versions[policy] = version
        self.gate.open()

    def sample(self, number: int, tokens: int = 3) -> None:
        """Let a try go on by so many tokens, as soon as it is made."""
        for _ in range(tokens):
            self.turns[number].release()

    async def ask(self, *, stream: bool = False, model: str = "default") -> tuple[int, list[int], list[int]]:
        """The version of a response, its tokens, and those that were watched."""
        watched = list[int]()

        def watch(token: SampledToken) -> None:
            watched.append(token.id)
            self.came.set()

        generated = await self.backend.generate(Request("r", PROMPT, 3, watch=watch if stream else None, model=model))
        (response,) = generated.responses
        return generated.version, response.ids.tolist(), watched

    async def follow(self) -> tuple[int, list[int], list[int]]:
        return await self.ask(stream=True)

    async def tried(self, number: int) -> None:
        """Wait until so many tries were made."""
        async with asyncio.timeout(10):
            while len(self.tries) < number:  # noqa: ASYNC110
                await asyncio.sleep(0)


def ids_of(number: int) -> list[int]:
    return [10 * number, 10 * number + 1, 10 * number + 2]


@pytest.fixture
def server() -> Server:
    return Server()


async def test_nothing_is_sampled_before_the_first_weights_are_there(server: Server) -> None:
    server.sample(1)
    question = asyncio.create_task(server.ask())
    await asyncio.sleep(0.05)
    assert server.tries == []
    server.open(1)
    assert await question == (1, [10, 11, 12], [])


@pytest.mark.parametrize("failing", [False, True])
async def test_what_was_begun_before_an_exchange_is_sampled_anew_after_it(server: Server, failing: bool) -> None:
    """The old weights finish it, or it is aborted: it counts for nothing, but its tokens are counted."""
    server.open(4)
    question = asyncio.create_task(server.ask())
    await server.tried(1)
    await server.gate.close()
    server.failing = failing
    server.sample(1)
    await asyncio.sleep(0.05)
    server.failing = False
    assert not question.done()
    server.sample(2)
    server.open(5)
    assert await question == (5, [20, 21, 22], [])
    first, second = server.tries
    assert first.prompt_ids is second.prompt_ids
    decoded = 3 if failing else 6
    assert server.gate.counters == {"tokens_prefilled": 2 * decoded // 3, "tokens_reused": 0, "tokens_decoded": decoded}


async def test_a_second_exchange_during_the_second_try_is_noticed_too(server: Server) -> None:
    server.open(1)
    question = asyncio.create_task(server.ask())
    for version in (2, 3):
        await server.tried(version - 1)
        await server.gate.close()
        server.open(version)
        server.sample(version - 1)
    server.sample(3)
    assert (await question)[0] == 3


async def test_a_response_has_the_version_of_the_policy_that_was_asked(server: Server) -> None:
    server.open(4, "solver")
    server.open(7, "checker")
    versions = []
    for number, model in enumerate(("solver", "checker", "solver"), 1):
        server.sample(number)
        versions.append((await server.ask(model=model))[0])
    assert versions == [4, 7, 4]


async def test_an_error_of_the_server_is_passed_on(server: Server) -> None:
    server.open(1)
    server.failing = True
    server.sample(1)
    with pytest.raises(EngineError, match="aborted"):
        await server.ask()


async def test_an_exchange_waits_for_the_end_of_a_stream(server: Server) -> None:
    server.open(1)
    stream = asyncio.create_task(server.follow())
    server.sample(1, 1)
    await server.came.wait()
    closing = asyncio.create_task(server.gate.close(60))
    await asyncio.sleep(0.01)
    late = asyncio.create_task(server.ask())
    await asyncio.sleep(0.01)
    assert not closing.done()
    server.sample(1, 2)
    assert await stream == (1, [10, 11, 12], [10, 11, 12])
    await closing
    assert len(server.tries) == 1
    server.open(2)
    server.sample(2)
    assert await late == (2, [20, 21, 22], [])


@pytest.mark.parametrize("failing", [False, True])
async def test_a_stream_that_takes_too_long_ends_with_an_error(server: Server, failing: bool) -> None:
    server.open(1)
    stream = asyncio.create_task(server.follow())
    server.sample(1, 1)
    await server.came.wait()
    await server.gate.close(0.01)
    server.open(2)
    server.failing = failing
    server.sample(1, 2)
    with pytest.raises(EngineError, match="aborted" if failing else "weights changed"):
        await stream
    server.failing = False
    assert len(server.tries) == 1
    server.sample(2)
    assert await server.follow() == (2, [20, 21, 22], [20, 21, 22])


@pytest.mark.parametrize("sent", [0, 1, 3])
async def test_a_stream_that_begins_at_a_closing_gate_is_of_one_version(server: Server, sent: int) -> None:
    """Another one holds the exchange up."""
    server.open(1)
    other = asyncio.create_task(server.follow())
    server.sample(1, 1)
    await server.came.wait()
    stream = asyncio.create_task(server.follow())
    await server.tried(2)
    closing = asyncio.create_task(server.gate.close(60))
    await asyncio.sleep(0.01)
    server.sample(2, sent)
    await asyncio.sleep(0.01)
    server.sample(1, 2)
    assert (await other)[0] == 1
    await closing
    server.sample(2, 3 - sent)
    server.open(2)
    server.sample(3)
    assert await stream == ((1, [20, 21, 22], []) if sent == 3 else (2, [30, 31, 32], [30, 31, 32]))


async def test_a_client_that_leaves_its_stream_holds_no_exchange_up(server: Server) -> None:
    server.open(1)
    stream = asyncio.create_task(server.follow())
    server.sample(1, 1)
    await server.came.wait()
    stream.cancel()
    await asyncio.wait_for(server.gate.close(60), 10)


async def passed(request: HttpRequest) -> JSONResponse:
    return JSONResponse({})


class Front(FrontApp):
    made = 0

    def make_chat(self, app: Starlette) -> Starlette:
        Front.made += 1
        return create_app({}, app.state.backend, api_key=KEY)


SERVED = Starlette(routes=[Route(path, passed, methods=["GET", "POST"]) for path in ("/health", "/metrics", *OTHERS)])
SERVED.state.backend = Server().backend
SERVED.add_middleware(Front)
CLIENT = httpx.AsyncClient(transport=httpx.ASGITransport(SERVED), base_url="http://server")
OWN = {"authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("headers", [{}, OWN])
async def test_only_health_and_metrics_are_the_servers_own(headers: dict[str, str]) -> None:
    for path in ("/health", "/metrics"):
        assert (await CLIENT.get(path, headers=headers)).status_code == 200
        assert (await CLIENT.post(path, headers=headers)).status_code == 404
    for path in OTHERS:
        assert (await CLIENT.get(path, headers=headers)).status_code == 404
        assert (await CLIENT.post(path, json={}, headers=headers)).status_code == 404, "it would sample past the gate"
    of_chat = await CLIENT.post(CHAT_COMPLETIONS, json={}, headers=headers)
    assert of_chat.status_code == (400 if headers else 401), "the chat layer takes the key"
    assert Front.made == 1, "it remembers the replies that are echoed"


async def test_no_websocket_is_opened() -> None:
    sent: list[dict[str, object]] = []

    async def unreachable() -> None:
        raise AssertionError

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    await SERVED({"type": "websocket", "path": "/v1/realtime", "headers": []}, unreachable, send)  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["websocket.close"]
