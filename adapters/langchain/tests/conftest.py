"""A small scripted OpenAI server on loopback, attempts to run agents in, and the ways to observe an agent."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from langchain_core.tracers import context as langchain_context

import agl_core
import agl_langchain
from agl_core.capture import ActiveAttempt, Recording, reports
from agl_langchain import callback

Script = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class Seen:
    """A request as it arrived."""

    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def rollout(self) -> str | None:
        return self.headers.get("x-agl-rollout")

    @property
    def agent(self) -> str | None:
        return self.headers.get("x-agl-agent")

    @property
    def said(self) -> str:
        """The last user message, by which tests tell requests apart."""
        return next(m["content"] for m in reversed(self.body["messages"]) if m["role"] == "user")


def answer(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def ask(*calls: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """A message that asks for tools: (id, name, arguments) each."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for id, name, arguments in calls
        ],
    }


def in_turn(*replies: dict[str, Any]) -> Script:
    """The n-th request of a conversation (by the assistant messages in it) gets the n-th reply."""
    return lambda body: replies[sum(message["role"] == "assistant" for message in body["messages"])]


@dataclass
class ScriptedServer:
    """Speaks chat completions, streaming or not, and text completions; what it says is `script(body)`."""

    root: str
    script: Script = lambda body: answer("done")
    seen: list[Seen] = field(default_factory=list)
    reply_id: str | None = None
    """The id of every reply; None: each has its own."""

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    def agents(self) -> list[str | None]:
        return [request.agent for request in self.seen]


def _serve() -> tuple[ThreadingHTTPServer, ScriptedServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            server.seen.append(Seen(body, {name.lower(): value for name, value in self.headers.items()}))
            number = len(server.seen)
            try:
                message = server.script(body)
            except Exception as error:
                return self._send(500, "application/json", json.dumps({"error": {"message": repr(error)}}))
            reason = "tool_calls" if message.get("tool_calls") else "stop"
            head = {"id": server.reply_id or f"chatcmpl-{number}", "created": 1, "model": body["model"]}
            if self.path.endswith("/v1/completions"):
                choice = {"index": 0, "text": message["content"], "finish_reason": reason}
                return self._send(200, "application/json", json.dumps({**head, "choices": [choice], "usage": {}}))
            if not body.get("stream"):
                choice = {"index": 0, "message": message, "finish_reason": reason}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                reply = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
                return self._send(200, "application/json", json.dumps(reply))
            delta = {**message, "tool_calls": [{"index": i, **c} for i, c in enumerate(message.get("tool_calls", []))]}
            chunks = [
                {**head, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": d, "finish_reason": r}]}
                for d, r in ((delta, None), ({}, reason))
            ]
            events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
            return self._send(200, "text/event-stream", events)

        def _send(self, status: int, kind: str, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    listener = Listener(("127.0.0.1", 0), Handler)
    server = ScriptedServer(f"http://127.0.0.1:{listener.server_port}")
    threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
    return listener, server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    listener, scripted = _serve()
    monkeypatch.setenv("OPENAI_BASE_URL", scripted.url)
    monkeypatch.setenv("OPENAI_API_BASE", scripted.url)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    yield scripted
    listener.shutdown()
    listener.server_close()


@pytest.fixture
def other_host() -> Iterator[ScriptedServer]:
    listener, scripted = _serve()
    yield scripted
    listener.shutdown()
    listener.server_close()


@pytest.fixture
def attempt(server: ScriptedServer) -> Callable[..., ActiveAttempt]:
    """Makes attempts whose Lightning Server is the scripted one."""
    return lambda rollout="r1": ActiveAttempt(rollout, 0, server.root, "key", Recording())


@pytest.fixture
def seen_by_agl() -> Iterator[None]:
    """What a worker does before it loads an agent."""
    attachment = agl_core.attach([])
    yield
    attachment.detach()


@pytest.fixture
def attached() -> None:
    agl_langchain.attach()


@pytest.fixture(autouse=True)
def detached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What attaches in a test is undone."""
    monkeypatch.setattr(langchain_context, "_configure_hooks", list(langchain_context._configure_hooks))
    yield
    agl_core.attach([]).detach()
    callback.attach.cache_clear()


@pytest.fixture(params=["callback", "attach", "both"])
def config(request: pytest.FixtureRequest, seen_by_agl: None) -> dict[str, Any]:
    """What the user passes to the agent, in each way to observe it; every way has to see the same."""
    if request.param != "callback":
        request.getfixturevalue("attached")
    return {} if request.param == "attach" else {"callbacks": [agl_langchain.AglCallback()]}


@pytest.fixture(name="answer")
def answer_fixture() -> Callable[..., dict[str, Any]]:
    return answer


@pytest.fixture(name="ask")
def ask_fixture() -> Callable[..., dict[str, Any]]:
    return ask


@pytest.fixture(name="in_turn")
def in_turn_fixture() -> Callable[..., Script]:
    return in_turn


@pytest.fixture(autouse=True)
def no_problems(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Adapters swallow their failures; here they fail the test, unless it is about them."""
    yield
    if "expects_problems" not in request.keywords:
        assert [r.getMessage() for r in caplog.get_records("call") if r.name == reports.__name__] == []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "expects_problems: the test makes an adapter fail")
