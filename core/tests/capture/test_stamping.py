"""Which requests are stamped, with what; seen from the transport of real clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import httpx2
import openai
import pytest

import agl_core
from agl_core.capture import ActiveAttempt, Identity, Recording, identify, running
from agl_core.capture.requests import Stamping, stamp_library
from agl_core.capture.wrapping import Patches

BASE = "http://127.0.0.1:8000"


class Wire:
    """Answers every request and keeps its headers."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.requests: list[Any] = []
        self.statuses = iter([200] * 100)
        self.transport = library.MockTransport(self.answer)

    def answer(self, request: Any) -> Any:
        self.requests.append(request)
        reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": []}
        return self.library.Response(next(self.statuses), json=reply, headers={"retry-after-ms": "1"})

    def stamps(self) -> list[dict[str, str]]:
        return [{k: v for k, v in r.headers.items() if k.startswith("x-agl")} for r in self.requests]


@pytest.fixture(autouse=True)
def attached() -> Iterator[None]:
    attachment = agl_core.attach([])
    yield
    attachment.detach()


@pytest.fixture(params=[httpx, httpx2], ids=["httpx", "httpx2"])
def wire(request: pytest.FixtureRequest) -> Wire:
    return Wire(request.param)


def attempt(rollout: str = "r1", base_url: str = BASE) -> ActiveAttempt:
    return ActiveAttempt(rollout, 2, base_url, "key", Recording())


def test_rollout_agent_and_parent_span_are_stamped(wire: Wire) -> None:
    with wire.library.Client(transport=wire.transport) as client, running(attempt()):
        client.post(f"{BASE}/v1/chat/completions", json={})
        with identify("solver", span="s2", parent_span="s1"):
            client.post(f"{BASE}/v1/chat/completions", json={})
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


def test_outside_an_attempt_nothing_is_stamped(wire: Wire) -> None:
    with wire.library.Client(transport=wire.transport) as client, identify("solver"):
        client.get(f"{BASE}/v1")
    assert wire.stamps() == [{}]


@pytest.mark.parametrize("name", ["研究员", "a\r\nx-evil: 1", "é", "100%", " spaced ", "x" * 5000])
def test_any_name_makes_a_header_that_is_legal(wire: Wire, name: str) -> None:
    with wire.library.Client(transport=wire.transport) as client, running(attempt()), identify(name):
        client.get(f"{BASE}/v1")
    value = wire.stamps()[0]["x-agl-agent"]
    assert value.isascii()
    assert value.isprintable()
    assert len(value) <= 512


def client_of(wire: Wire, asynchronous: bool) -> Any:
    """An openai client; 3.x speaks through httpx2."""
    kind, http = (openai.AsyncOpenAI, httpx2.AsyncClient) if asynchronous else (openai.OpenAI, httpx2.Client)
    return kind(base_url=f"{BASE}/v1", api_key="k", max_retries=3, http_client=http(transport=wire.transport))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_retries_of_the_openai_client_carry_the_marker_of_their_first_try(asynchronous: bool) -> None:
    wire = Wire(httpx2)
    wire.statuses = iter([500, 429, 200, 200, 503, 200])
    client = client_of(wire, asynchronous)

    async def ask_async() -> None:
        for _ in range(3):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "same"}])

    with running(attempt()):
        if asynchronous:
            asyncio.run(ask_async())
        else:
            for _ in range(3):
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "same"}])
    markers = [stamp["x-agl-retry"] for stamp in wire.stamps()]
    first, second, third = markers[0], markers[3], markers[4]
    assert markers == [first, first, first, second, third, third]
    assert len({first, second, third}) == 3


def test_retries_of_concurrent_identical_requests_are_told_apart() -> None:
    wire = Wire(httpx2)
    seen: dict[str, int] = {}

    def answer(request: Any) -> Any:
        marker = request.headers["x-agl-retry"]
        seen[marker] = seen.get(marker, 0) + 1
        return httpx2.Response(500 if seen[marker] == 1 else 200, json={"choices": []}, headers={"retry-after-ms": "1"})

    wire.transport = httpx2.MockTransport(answer)
    client = client_of(wire, asynchronous=True)

    async def run() -> None:
        message: Any = {"role": "user", "content": "same"}
        await asyncio.gather(*(client.chat.completions.create(model="m", messages=[message]) for _ in range(5)))

    with running(attempt()):
        asyncio.run(run())
    assert sorted(seen.values()) == [2] * 5


def test_a_retry_whose_first_try_is_not_known_is_not_marked(wire: Wire) -> None:
    with wire.library.Client(transport=wire.transport) as client, running(attempt()):
        client.post(f"{BASE}/v1", content=b"a", headers={"x-stainless-retry-count": "0"})
        client.post(f"{BASE}/v1", content=b"another", headers={"x-stainless-retry-count": "1"})
        client.post(f"{BASE}/v1", content=iter([b"a"]), headers={"x-stainless-retry-count": "0"})
        client.post(f"{BASE}/v1", content=b"a")
    assert ["x-agl-retry" in stamp for stamp in wire.stamps()] == [True, False, False, False]


def test_a_resolver_is_asked_where_nobody_entered_an_identity(wire: Wire) -> None:
    stamping, answers = Stamping(), iter([None, Identity("from-trace", parent_span="turn-1")])

    def broken() -> Identity | None:
        raise RuntimeError("trace is gone")

    stamping.resolvers += [broken, lambda: next(answers)]
    patches = Patches()
    stamp_library(wire.library, stamping, patches)
    active = attempt()
    try:
        with wire.library.Client(transport=wire.transport) as client, running(active):
            client.get(f"{BASE}/v1")
            client.get(f"{BASE}/v1")
            with identify("entered"):
                client.get(f"{BASE}/v1")
    finally:
        patches.restore()
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
