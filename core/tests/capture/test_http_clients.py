"""HTTP clients of agents: their requests are stamped, and use no connection that is closed."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import httpx2
import openai
import pytest
import requests
import urllib3

import agl_core
from agl_core.capture import AttemptContext, Identity, Recording, identify, running
from agl_core.capture.requests import HEADER_ROLLOUT
from agl_server.testing import LeasedAttempt, Stack

pytestmark = pytest.mark.usefixtures("attached")

BASE = "http://127.0.0.1:8000"


class Wire:
    """Answers every request and keeps its headers."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.requests: list[Any] = []
        self.transport = library.MockTransport(self.answer)

    def answer(self, request: Any) -> Any:
        self.requests.append(request)
        reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": []}
        return self.library.Response(200, json=reply)

    def stamps(self) -> list[dict[str, str]]:
        return [{k: v for k, v in r.headers.items() if k.startswith("x-agl")} for r in self.requests]


@pytest.fixture(params=[httpx, httpx2], ids=["httpx", "httpx2"])
def wire(request: pytest.FixtureRequest) -> Wire:
    return Wire(request.param)


def attempt(rollout: str = "r1", base_url: str = BASE) -> AttemptContext:
    return AttemptContext(rollout, 2, base_url, "key", Recording())


def test_rollout_agent_and_parent_span_are_stamped(wire: Wire) -> None:
    with wire.library.Client(transport=wire.transport) as client, running(attempt()):
        client.post(f"{BASE}/v1/chat/completions", json={})
        with identify("solver", span="s2", parent_span="s1"):
            client.post(f"{BASE}/v1/messages", json={}, headers={"x-api-key": "the client's own"})
    assert [request.headers.get("x-api-key") for request in wire.requests] == [None, "key"]
    assert {request.headers["authorization"] for request in wire.requests} == {"Bearer key"}
    assert wire.stamps() == [
        {"x-agl-rollout": "r1/2"},
        {"x-agl-rollout": "r1/2", "x-agl-agent": "solver", "x-agl-parent-span": "s1"},
    ]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8001/v1/chat/completions",
        "https://127.0.0.1:8000/v1",
        "http://127.0.0.1/v1",
        "http://api.openai.com/v1",
        "http://127.0.0.1:8000@evil.example/v1",
        "http://127.0.0.1.evil.example:8000/v1",
    ],
)
def test_no_other_host_is_told_anything(wire: Wire, url: str) -> None:
    with wire.library.Client(transport=wire.transport) as client, running(attempt()), identify("solver"):
        client.get(url)
    assert wire.stamps() == [{}]


def test_only_below_the_path_of_the_base_url(wire: Wire) -> None:
    with wire.library.Client(transport=wire.transport) as client, running(attempt(base_url="https://h/agl")):
        for path in ("agl/v1", "agl", "aglet/v1", "v1"):
            client.get(f"https://h:443/{path}")
    assert [bool(stamp) for stamp in wire.stamps()] == [True, True, False, False]


@pytest.mark.parametrize("name", ["研究员", "a\r\nx-evil: 1", "é", "100%", " spaced ", "x" * 5000, "\ud83c"])
def test_any_name_makes_a_header_that_is_legal(wire: Wire, name: str) -> None:
    with wire.library.Client(transport=wire.transport) as client, running(attempt()), identify(name):
        client.get(f"{BASE}/v1")
    value = wire.stamps()[0]["x-agl-agent"]
    assert value.isascii()
    assert value.isprintable()
    assert len(value) <= 512


def test_a_resolver_is_asked_where_nobody_entered_an_identity(wire: Wire) -> None:
    answers = iter([None, Identity("from-trace", parent_span="turn-1")])

    def broken() -> Identity | None:
        raise RuntimeError("trace is gone")

    resolvers = (broken, lambda: next(answers))
    agl_core.attach(SimpleNamespace(framework="json", attach=lambda asked=asked: asked) for asked in resolvers)
    active = attempt()
    with wire.library.Client(transport=wire.transport) as client, running(active):
        client.get(f"{BASE}/v1")
        client.get(f"{BASE}/v1")
        with identify("entered"):
            client.get(f"{BASE}/v1")
    assert [stamp.get("x-agl-agent") for stamp in wire.stamps()] == [None, "from-trace", "entered"]
    assert active.recording.problems == ("Asking a framework who makes a call failed: RuntimeError: trace is gone",)


def test_a_failure_of_stamping_does_not_fail_the_request(wire: Wire) -> None:
    active = attempt(base_url="http://127.0.0.1:not-a-port")
    with wire.library.Client(transport=wire.transport) as client, running(active):
        assert client.get("http://127.0.0.1:8000/v1").status_code == 200
    assert active.recording.problems


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("https://api.openai.com/v1/responses", "https://api.openai.com/v1/responses"),
        (
            "https://user:pass@gate.example:8443/x/chat/completions/?key=1",
            "https://gate.example:8443/x/chat/completions",
        ),
        ("https://api.anthropic.com:443/v1/messages?beta=true", "https://api.anthropic.com/v1/messages"),
        ("http://localhost:4000/v1/messages", "http://localhost:4000/v1/messages"),
        ("https://api.deepseek.com/anthropic/v1/messages", "*"),
        ("https://openrouter.ai/api/v1/messages", "*"),
        ("https://a.openai.azure.com/openai/deployments/d/chat/completions?api-version=1", "*"),
        ("https://generativelanguage.googleapis.com/v1beta/models/gemini-9:streamGenerateContent?alt=sse", "*"),
        ("https://bedrock-runtime.eu-west-1.amazonaws.com/model/claude/converse-stream", "*"),
        ("http://127.0.0.1:11434/api/chat", "*"),
        ("http://localhost:8000/v1/chat/completions", None),  # The server, by another of its names.
        ("https://chat.example/v1/messages", None),
        ("https://api.openai.com/v1/embeddings", None),
        ("https://api.openai.com/v1/models", None),
        ("https://search.example/?q=https://api.openai.com/v1/responses", None),
        ("https://forms.example/forms/7/responses", None),
    ],
)
def test_calls_of_models_elsewhere_are_counted(wire: Wire, url: str, address: str | None) -> None:
    active = attempt()
    with wire.library.Client(transport=wire.transport) as client, running(active):
        client.post(url, json={})
    expected = {} if address is None else {url.partition("?")[0] if address == "*" else address: 1}
    assert active.recording.bypassed_calls == expected
    assert bool(wire.stamps()[0]) is (":8000/" in url)


# A request polls the connection that it uses, and uses none that is closed.


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
async def test_only_the_connection_that_is_about_to_be_used_is_polled(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, polled = library.replace("httpx", "httpcore"), 0

    def polling(readable: Any) -> Any:
        def counted(sock: Any) -> bool:
            nonlocal polled
            polled += 1
            return bool(readable(sock))

        return counted

    for backend in ("sync", "anyio"):
        module = importlib.import_module(f"{core}._backends.{backend}")
        monkeypatch.setattr(module, "is_socket_readable", polling(module.is_socket_readable))

    async with Connections() as server:

        def block() -> int:
            with importlib.import_module(library).Client(base_url=server.url, trust_env=False) as client:
                with ThreadPoolExecutor(9) as threads:
                    assert list(threads.map(lambda _: client.get("/together").status_code, range(9))) == [200] * 9
                before = polled
                assert client.get("/").status_code == 200
                return polled - before

        assert await asyncio.to_thread(block) == 1
        async with importlib.import_module(library).AsyncClient(base_url=server.url, trust_env=False) as client:
            await asyncio.gather(*(client.get("/together") for _ in range(9)))
            before = polled
            assert (await client.get("/")).status_code == 200
            assert polled - before == 1


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
async def test_connections_that_the_server_has_closed_are_not_used(library: str) -> None:
    async with Connections() as server:
        async with importlib.import_module(library).AsyncClient(base_url=server.url, trust_env=False) as client:
            await asyncio.gather(*(client.get("/together") for _ in range(9)))
            await server.hang_up()
            assert (await client.post("/", content=b"once")).status_code == 200

        def block() -> int:
            with importlib.import_module(library).Client(base_url=server.url, trust_env=False) as client:
                assert client.get("/").status_code == 200
                asyncio.run_coroutine_threadsafe(server.hang_up(), loop).result()
                return int(client.post("/", content=b"once").status_code)

        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(block) == 200


class Connections:
    """A server that answers 200 and keeps connections; to /together, once nine of its connections have asked."""

    def __init__(self) -> None:
        self._open: set[asyncio.StreamWriter] = set()
        self._together = asyncio.Barrier(9)

    async def __aenter__(self) -> Connections:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self.hang_up()

    async def hang_up(self) -> None:
        """Close every connection, and wait until the client's system has heard of it."""
        for writer in list(self._open):
            writer.close()
            await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(4 if b"POST" in head else 0)
                if b"/together" in head:
                    await self._together.wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        self._open.discard(writer)
        writer.close()


# Requests of clients other than httpx are stamped, so that tools without ids find their calls.


BODY = json.dumps({"model": "default", "messages": [{"role": "user", "content": "hello"}]}).encode()
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer a-key-of-no-attempt"}


def by_requests(url: str) -> Any:
    return requests.post(url, data=BODY, headers=HEADERS, timeout=20).json()


def by_urllib3(url: str) -> Any:
    with urllib3.PoolManager(headers=HEADERS) as pool:
        return pool.request("POST", url, body=BODY).json()


async def by_aiohttp(url: str) -> Any:
    async with aiohttp.ClientSession(headers=HEADERS) as session, session.post(url, data=BODY) as reply:
        return await reply.json()


async def by_aiohttp_with_a_base(url: str) -> Any:
    parts = urlsplit(url)
    async with aiohttp.ClientSession(f"{parts.scheme}://{parts.netloc}") as session:
        reply = await session.post(parts.path, json=json.loads(BODY), headers=[*HEADERS.items()])
        return await reply.json()


@agl_core.tool
def look_up(what: str) -> str:
    return what


def joined(episode: Any) -> list[list[str]]:
    return [[result.arguments["what"] for result in transition.tool_results] for transition in episode.transitions]


@pytest.mark.parametrize("ask", [by_requests, by_urllib3, by_aiohttp, by_aiohttp_with_a_base])
async def test_calls_of_other_clients_are_stamped_and_tools_join_them_but_no_other_host_is_told(
    stack: Stack, ask: Any
) -> None:
    attempt = await stack.attempt()
    url, elsewhere = f"{stack.url()}/chat/completions", f"{stack.upstream.url}/chat/completions"

    async def send(url: str) -> Any:
        return await reply if inspect.isawaitable(reply := ask(url)) else reply

    async def agent() -> None:
        with openai.OpenAI(base_url=stack.url(), api_key="k") as client, agl_core.agent("solver"):
            client.chat.completions.create(model="default", messages=json.loads(BODY)["messages"])
            look_up("first")
            assert (await send(url))["choices"][0]["message"]["role"] == "assistant"
            look_up("second")
            await send(elsewhere)
            await send(url)
            look_up("third")

    with attempt.running():
        await asyncio.to_thread(asyncio.run, agent())  # Some of these clients block.
    calls = await attempt.calls()
    assert [(call.agent, call.stamped) for call in calls] == [("solver", True)] * 3
    directly = stack.upstream.received[2].headers
    assert not [name for name in directly if name.lower().startswith("x-agl")]
    assert stack.key(attempt.key) not in str(dict(directly))
    assert attempt.active.recording.bypassed_calls == {elsewhere: 1}, "but the rollout says that it was called"
    episode = await attempt.close()
    assert joined(episode) == [["first"], ["second"], ["third"]]
    assert (episode.unjoined, episode.unattributed) == ((), 0)


async def test_after_a_call_of_an_unknown_client_no_tool_is_joined(stack: Stack) -> None:
    attempt = await stack.attempt()
    with attempt.running(), agl_core.agent("solver"):
        await openai_call(stack)
        look_up("first")
        await openai_call(stack)
        await by_a_raw_socket(stack, attempt)
        look_up("whose?")
        await openai_call(stack)
        look_up("last")
    assert [call.stamped for call in await attempt.calls()] == [True, True, False, True]
    episode = await attempt.close()
    assert joined(episode) == [["first"], [], [], ["last"]]
    assert [result.arguments["what"] for result in episode.unjoined] == ["whose?"]
    assert episode.unattributed == 1


async def openai_call(stack: Stack) -> openai.types.chat.ChatCompletion:
    messages = json.loads(BODY)["messages"]
    return await stack.client().chat.completions.create(model="default", messages=messages)


async def by_a_raw_socket(stack: Stack, attempt: LeasedAttempt) -> None:
    parts = urlsplit(stack.server.base_url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stack.key(attempt.key)}\r\n"
        f"Connection: close\r\nContent-Length: {len(BODY)}\r\n\r\n"
    )
    writer.write(head.encode() + BODY)
    reply = await reader.read()
    writer.close()
    assert reply.startswith(b"HTTP/1.1 200"), reply
    assert HEADER_ROLLOUT.encode() not in reply
