"""What the example's tests share: its modules on the path, its agent, and a scripted OpenAI-compatible endpoint."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

import pytest

EXAMPLE = Path(__file__).parents[1]
sys.path.append(str(EXAMPLE))

Solve: TypeAlias = Callable[[dict[str, str]], Awaitable[str]]


@dataclass
class ScriptedModel:
    """Answers chat completions with scripted messages and keeps what it was sent."""

    replies: list[dict[str, Any]] = field(default_factory=list)
    """Assistant messages in order; the last one is repeated."""
    requests: list[dict[str, Any]] = field(default_factory=list)

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        message = self.replies[min(len(self.requests), len(self.replies)) - 1]
        ended = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": ended}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        names = {"id": f"reply-{len(self.requests)}", "object": "chat.completion", "model": "default", "created": 1}
        return {**names, "choices": [choice], "usage": usage}


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = json.dumps(self.server.model.reply(request)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    model: ScriptedModel


@pytest.fixture
def endpoint() -> Iterator[_Server]:
    server = _Server(("127.0.0.1", 0), _Handler)
    server.model = ScriptedModel()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def model(endpoint: _Server) -> ScriptedModel:
    """The model behind the agent, to be given replies."""
    return endpoint.model


@pytest.fixture
def solve(endpoint: _Server, monkeypatch: pytest.MonkeyPatch) -> Solve:
    """The agent's entry. Other examples have an `agent` too, so this one is imported by its file."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{endpoint.server_port}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    spec = importlib.util.spec_from_file_location("math_agent", EXAMPLE / "agent.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    entry: Solve = module.solve
    return entry
