"""Which requests are stamped, with what; seen from the transport of real clients."""

from __future__ import annotations

from typing import Any

import httpx
import httpx2
import pytest

from agl_core.capture import AttemptContext, Identity, Recording, identify, running
from agl_core.capture.requests import HTTP_LIBRARIES, Stamper
from agl_core.capture.wrapping import Patches

pytestmark = pytest.mark.usefixtures("attached")

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


@pytest.fixture(params=[httpx, httpx2], ids=["httpx", "httpx2"])
def wire(request: pytest.FixtureRequest) -> Wire:
    return Wire(request.param)


def attempt(rollout: str = "r1", base_url: str = BASE) -> AttemptContext:
    return AttemptContext(rollout, 2, base_url, "key", Recording())


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


@pytest.mark.parametrize("name", ["研究员", "a\r\nx-evil: 1", "é", "100%", " spaced ", "x" * 5000, "\ud83c"])
def test_any_name_makes_a_header_that_is_legal(wire: Wire, name: str) -> None:
    with wire.library.Client(transport=wire.transport) as client, running(attempt()), identify(name):
        client.get(f"{BASE}/v1")
    value = wire.stamps()[0]["x-agl-agent"]
    assert value.isascii()
    assert value.isprintable()
    assert len(value) <= 512


def test_a_resolver_is_asked_where_nobody_entered_an_identity(wire: Wire) -> None:
    stamper, answers = Stamper(), iter([None, Identity("from-trace", parent_span="turn-1")])

    def broken() -> Identity | None:
        raise RuntimeError("trace is gone")

    stamper.resolvers += [broken, lambda: next(answers)]
    patches = Patches()
    HTTP_LIBRARIES[wire.library.__name__](wire.library, stamper, patches)
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
