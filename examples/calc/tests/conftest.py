"""What the example's tests share: a scripted OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class ScriptedModel:
    """Answers chat completions with scripted messages and keeps what it was sent."""

    replies: list[dict[str, Any]] = field(default_factory=list)
    """Assistant messages in order; the last one is repeated."""
    requests: list[dict[str, Any]] = field(default_factory=list)

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        message = self.replies[min(len(self.requests), len(self.replies)) - 1]
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        name = f"reply-{len(self.requests)}"
        return {
            "id": name,
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }


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


@pytest.fixture(scope="session")
def _endpoint() -> Iterator[_Server]:
    """One endpoint for the session: the agent, made once at import, keeps the address it saw then."""
    server = _Server(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    os.environ["OPENAI_BASE_URL"] = f"http://127.0.0.1:{server.server_port}/v1"
    os.environ["OPENAI_API_KEY"] = "unused"
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def model(_endpoint: _Server) -> ScriptedModel:
    """The model behind the agent, to be given replies."""
    _endpoint.model = ScriptedModel()
    return _endpoint.model


@pytest.fixture
def solve(model: ScriptedModel) -> Any:
    """The agent's entry, imported when its environment is ready."""
    from agent import solve

    return solve
