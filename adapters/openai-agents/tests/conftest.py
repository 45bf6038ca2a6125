"""A small scripted server that speaks both of OpenAI's model APIs on loopback, and the ways to observe an agent."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import agents
import openai
import pytest
from agents.models import _openai_shared, openai_provider
from agents.tracing import processors, setup
from agents.tracing.processor_interface import TracingExporter

import agl_core
import agl_openai_agents
from agl_core.capture import ActiveAttempt, Recording, reports
from agl_openai_agents import AglProcessor, tools

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[3] / "core" / "tests" / "server"))


@dataclass(frozen=True)
class Reply:
    """What the model says: a text, or tool calls, (id, name, arguments) each; arguments may be text as they stand."""

    text: str | None = None
    calls: tuple[tuple[str, str, Any], ...] = ()


def answer(text: str) -> Reply:
    return Reply(text)


def ask(*calls: tuple[str, str, Any]) -> Reply:
    return Reply(calls=calls)


@dataclass
class Seen:
    """A request as it arrived."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def api(self) -> str:
        return "responses" if self.path.endswith("/responses") else "chat"

    @property
    def rollout(self) -> str | None:
        return self.headers.get("x-agl-rollout")

    @property
    def agent(self) -> str | None:
        return self.headers.get("x-agl-agent")

    @property
    def items(self) -> list[dict[str, Any]]:
        items = self.body["messages"] if self.api == "chat" else self.body["input"]
        return items if isinstance(items, list) else [{"role": "user", "content": items}]

    @property
    def turns(self) -> int:
        """How often the model has answered in this conversation."""
        return sum(item.get("role") == "assistant" or item.get("type") == "function_call" for item in self.items)

    @property
    def said(self) -> str:
        return str(next(item["content"] for item in self.items if item.get("role") == "user"))

    @property
    def instructions(self) -> str | None:
        if self.api == "responses":
            return self.body.get("instructions")
        return next((m["content"] for m in self.body["messages"] if m["role"] == "system"), None)


Script = Callable[[Seen], Reply]


def in_turn(*replies: Reply) -> Script:
    """The n-th request of a conversation gets the n-th reply."""
    return lambda seen: replies[min(seen.turns, len(replies) - 1)]


def by_agent(**scripts: Script) -> Script:
    """Each agent, told by its instructions, has a script of its own."""
    return lambda seen: scripts[str(seen.instructions)](seen)


@dataclass
class ScriptedServer:
    root: str
    script: Script = lambda seen: Reply("done")
    seen: list[Seen] = field(default_factory=list)
    returns_ids: bool = False
    """Whether replies of the Responses API carry token ids."""

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    def agents(self) -> list[str | None]:
        return [request.agent for request in self.seen]


def _chat(seen: Seen, reply: Reply, number: int) -> tuple[str, str]:
    head = {"id": f"chatcmpl-{number}", "created": 1, "model": seen.body["model"]}
    reason = "tool_calls" if reply.calls else "stop"
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": _text(arguments)}}
            for id, name, arguments in reply.calls
        ]
    if not seen.body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": reason}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return "application/json", json.dumps(
            {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
        )
    delta = {**message, "tool_calls": [{"index": i, **c} for i, c in enumerate(message.get("tool_calls", []))]}
    chunks = [
        {**head, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": d, "finish_reason": r}]}
        for d, r in ((delta, None), ({}, reason))
    ]
    return "text/event-stream", "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def _responses(seen: Seen, reply: Reply, number: int, ids: bool) -> tuple[str, str]:
    output: list[dict[str, Any]] = [
        {
            "type": "function_call",
            "id": f"fc-{number}-{place}",
            "call_id": id,
            "name": name,
            "arguments": _text(arguments),
            "status": "completed",
        }
        for place, (id, name, arguments) in enumerate(reply.calls)
    ]
    if reply.text is not None:
        part = {"type": "output_text", "text": reply.text, "annotations": []}
        output.append(
            {"type": "message", "id": f"msg-{number}", "role": "assistant", "status": "completed", "content": [part]}
        )
    response: dict[str, Any] = {
        "id": f"resp-{number}",
        "object": "response",
        "created_at": 1,
        "model": seen.body["model"],
        "status": "completed",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": seen.body.get("tools") or [],
        "temperature": seen.body.get("temperature"),
        "top_p": None,
        "instructions": seen.body.get("instructions"),
        "usage": {
            "input_tokens": 1,
            "output_tokens": 1,
            "total_tokens": 2,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }
    if ids:
        response |= {"prompt_token_ids": [1, 2, number], "token_ids": [3, number]}
    if not seen.body.get("stream"):
        return "application/json", json.dumps(response)
    events = [{"type": "response.created", "response": {**response, "status": "in_progress", "output": []}}]
    for place, item in enumerate(output):
        events.append({"type": "response.output_item.added", "output_index": place, "item": item})
        events.append({"type": "response.output_item.done", "output_index": place, "item": item})
    events.append({"type": "response.completed", "response": response})
    lines = (
        f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': place})}\n\n"
        for place, event in enumerate(events)
    )
    return "text/event-stream", "".join(lines)


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _serve() -> tuple[ThreadingHTTPServer, ScriptedServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen = Seen(self.path, body, {name.lower(): value for name, value in self.headers.items()})
            server.seen.append(seen)
            number = len(server.seen)
            try:
                reply = server.script(seen)
            except Exception as error:
                return self._send(500, "application/json", json.dumps({"error": {"message": repr(error)}}))
            if seen.api == "chat":
                return self._send(200, *_chat(seen, reply, number))
            return self._send(200, *_responses(seen, reply, number, server.returns_ids))

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


@pytest.fixture(params=["chat", "responses"])
def api(request: pytest.FixtureRequest) -> str:
    """Each of the SDK's model APIs."""
    return str(request.param)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    listener, scripted = _serve()
    monkeypatch.setenv("OPENAI_BASE_URL", scripted.url)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    yield scripted
    listener.shutdown()
    listener.server_close()


class Exports(TracingExporter):
    """Takes what the SDK's default processor would send to its vendor."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def export(self, items: list[Any]) -> None:
        self.items += items


@pytest.fixture(autouse=True)
def exports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exports]:
    """The SDK as it is before anything has touched it, except that nothing leaves this machine; what attaches in
    the test is undone."""
    exports = Exports()
    processor = processors.BatchTraceProcessor(exports)
    monkeypatch.setattr(processors, "_global_processor", processor)
    monkeypatch.setattr(setup, "GLOBAL_TRACE_PROVIDER", None)
    monkeypatch.setattr(openai_provider, "_http_client", None)
    for module, name, _ in tools._SEAMS:
        found = sys.modules[module]
        monkeypatch.setattr(found, name, inspect.unwrap(getattr(found, name)))  # another test's may be attached
    yield exports
    processor._shutdown_event.set()


@pytest.fixture(autouse=True)
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One loop per test, for the SDK keeps its HTTP client between runs; `run_sync` uses it too."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture
def use(api: str, monkeypatch: pytest.MonkeyPatch, server: ScriptedServer) -> str:
    """The API that agents with a plain model name use."""
    monkeypatch.setattr(_openai_shared, "_use_responses_by_default", api == "responses")
    return api


Run = Callable[..., Any]


def run_sync(agent: Any, question: Any, **options: Any) -> Any:
    return agents.Runner.run_sync(agent, question, **options)


def run_async(agent: Any, question: Any, **options: Any) -> Any:
    return asyncio.get_event_loop().run_until_complete(agents.Runner.run(agent, question, **options))


def run_streamed(agent: Any, question: Any, **options: Any) -> Any:
    async def consume() -> Any:
        result = agents.Runner.run_streamed(agent, question, **options)
        async for _ in result.stream_events():
            pass
        return result

    return asyncio.get_event_loop().run_until_complete(consume())


@pytest.fixture(params=[run_sync, run_async, run_streamed])
def run(request: pytest.FixtureRequest, use: str) -> Run:
    """Each way to run an agent, as `run(agent, question)`, under each API."""
    return request.param


@pytest.fixture(params=[(run_async, "responses"), (run_streamed, "chat")], ids=["run-responses", "streamed-chat"])
def run_briefly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, server: ScriptedServer) -> Run:
    """Both of the SDK's loops and both APIs, for what does not depend on how they are combined."""
    way, api = request.param
    monkeypatch.setattr(_openai_shared, "_use_responses_by_default", api == "responses")
    return way


@pytest.fixture
def no_retries(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that fails is not sent again."""
    monkeypatch.setattr(_openai_shared, "_default_openai_client", openai.AsyncOpenAI(max_retries=0))


@pytest.fixture
def attempt(server: ScriptedServer) -> Callable[..., ActiveAttempt]:
    """Makes attempts whose Lightning Server is the scripted one."""
    return lambda rollout="r1": ActiveAttempt(rollout, 0, server.root, "key", Recording())


@pytest.fixture
def detached() -> Iterator[None]:
    """What attaches in the test is undone."""
    yield
    agl_core.attach([]).detach()


@pytest.fixture
def attached(detached: None) -> None:
    agl_openai_agents.attach()


@pytest.fixture(params=["processor", "attach", "both"])
def observed(request: pytest.FixtureRequest, detached: None) -> AglProcessor | None:
    """Each way to observe an agent; every way has to see the same."""
    if request.param != "processor":
        agl_openai_agents.attach()
    if request.param == "attach":
        return None
    processor = AglProcessor()
    agents.add_trace_processor(processor)
    return processor


@pytest.fixture(name="answer")
def answer_fixture() -> Callable[..., Reply]:
    return answer


@pytest.fixture(name="ask")
def ask_fixture() -> Callable[..., Reply]:
    return ask


@pytest.fixture(name="in_turn")
def in_turn_fixture() -> Callable[..., Script]:
    return in_turn


@pytest.fixture(name="by_agent")
def by_agent_fixture() -> Callable[..., Script]:
    return by_agent


@pytest.fixture(autouse=True)
def no_problems(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Adapters swallow their failures; here they fail the test, unless it is about them."""
    yield
    if "expects_problems" not in request.keywords:
        assert [r.getMessage() for r in caplog.get_records("call") if r.name == reports.__name__] == []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "expects_problems: the test makes an adapter fail")
