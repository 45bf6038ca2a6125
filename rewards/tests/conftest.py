"""Makers of episodes for the tests of reward and credit rules, and a model server for those of the judge."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agl_core import kinds
from agl_core.kinds import Kind
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.types import Episode, Task, ToolResult, ToolStatus, Transition


class Episodes:
    """Makes episodes, and rules as a run would have them, with as little said as a test needs."""

    def __init__(self) -> None:
        self._plugins = Plugins.load()

    def rule(self, kind: Kind, name: str, **settings: Any) -> Any:
        """A registered rule, built from its settings."""
        component = self._plugins.component(kind, name, "[test]")
        return component.build(component.options.model_validate(settings))

    def tool_result(self, status: str = "ok", tool: str = "search", **more: Any) -> ToolResult:
        return ToolResult(f"{tool} {status}", "r", 0, tool, ToolStatus(status), **more)

    def transition(self, turn: int, *tool_results: ToolResult, **changes: Any) -> Transition:
        return make.transition(turn, *tool_results, **changes)

    def episode(
        self,
        *transitions: Transition | Sequence[ToolResult],
        result: Any = None,
        terminal: float | None = None,
        question: Any = "a question",
        metadata: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Episode:
        """An episode; a list of tool results stands for the transition that asked for them."""
        whole = [t if isinstance(t, Transition) else self.transition(i, *t) for i, t in enumerate(transitions)]
        task = Task("t1", question, metadata=metadata or {})
        return make.episode(*whole, task=task, result=result, terminal=terminal, **changes)


class Asked:
    """A request to a judge, as one reads it who trusts nothing between the two lines around the material."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.request = request
        self.system, self.user = (message["content"] for message in request["messages"])
        opening, text, closing, *after = self.user.split("\n")
        assert opening == closing
        assert f"'{opening}'" in self.system
        assert opening not in text
        self.material = json.loads(text)
        self.labels: list[str] = re.findall(r'"(\w+)": N', "\n".join(after))


class Endpoint(ThreadingHTTPServer):
    """Answers chat completions after `delay` seconds, and remembers what it was asked.

    The answer is `reply`, with a label in the place of LABEL, unless `judgement` makes another of what was asked.
    """

    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply: str | None = '{"LABEL": 7}'
        self.judgement: Callable[[Asked], Any] = self._reply
        """A text, or what is its JSON."""
        self.statuses: list[int] = []
        """Those of the next responses; then 200."""
        self.status = 200
        self.has_format = True
        """True if it takes a `response_format`."""
        self.delay = 0.0
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.came = threading.Semaphore(0)
        """Released by each request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def judge(self, episodes: Episodes, rule: str = "judge", **settings: Any) -> Any:
        """The reward rule that asks this endpoint."""
        given = {"base_url": self.url, "model": "m", "rubric": "Be {polite}.", **settings}
        return episodes.rule(kinds.REWARD, rule, **given)

    def _reply(self, asked: Asked) -> str | None:
        return self.reply and self.reply.replace("LABEL", asked.labels[0])


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.requests.append({"path": self.path, **json.loads(body)})
        server.authorizations.append(self.headers["Authorization"])
        server.came.release()
        time.sleep(server.delay)
        content = server.judgement(Asked(json.loads(body)))
        content = content if isinstance(content, str | None) else json.dumps(content)
        answer = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        is_refused = not server.has_format and "response_format" in json.loads(body)
        status = server.statuses.pop(0) if server.statuses else server.status
        self.send_response(400 if is_refused else status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr("agl_rewards.judge.RETRY_WAITS", (0.0, 0.0))
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="session", name="make")
def episodes_fixture() -> Episodes:
    return Episodes()
