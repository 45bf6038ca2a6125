"""Agents that run as services elsewhere: they get the task and the way to the model; their failures end the attempt."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agl_core.errors import AgentError
from agl_core.testing.readme import blocks
from agl_core.types import Ending
from agl_core.worker import Agent, RemoteAgent, TaskPerAttempt, load_agent

PAGE = Path(__file__).parents[3] / "docs" / "remote.md"

ONCE = pytest.mark.parametrize("workplace", [{"attempts": 1}], indirect=True)


@contextlib.asynccontextmanager
async def serving(answer: Any) -> AsyncIterator[str]:
    """The address of a service that answers each request by `answer(request)`."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=[Route("/solve", answer, methods=["POST"])]), log_level="critical")
    )
    running = asyncio.create_task(server.serve([listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/solve"
    finally:
        server.should_exit = True
        await running


async def asked(attempt: dict[str, Any], text: str) -> str:
    """One LLM call by what the service was sent."""
    options = {"api_key": attempt["api_key"], "default_headers": {**attempt["headers"], "x-agl-agent": "far"}}
    async with openai.AsyncOpenAI(base_url=attempt["base_url"], **options) as client:
        reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    return str(reply.choices[0].message.content)


async def run(workplace: Any, agent: RemoteAgent, inputs: list[Any]) -> Any:
    runner = TaskPerAttempt(Agent("test:agent", agent, wants_context=True, is_async=True))
    return await workplace.finish(workplace.start_runner(runner), inputs)


async def test_a_service_calls_the_model_for_its_attempt_and_reports_a_reward(workplace: Any) -> None:
    async def solve(request: Request) -> Response:
        body = await request.json()
        assert request.headers["x-service-key"] == "secret"
        await asked(body, f"hello {body['task']['number']}")
        return JSONResponse({"result": {"doubled": 2 * body["task"]["number"]}, "reward": {"speed": 0.5}})

    async with serving(solve) as url:
        agent = RemoteAgent(url, headers={"x-service-key": "secret"})
        ended = await run(workplace, agent, [{"number": 1}, {"number": 2}])
    for place, (rollout, attempt) in ended.items():
        assert (rollout.ending, attempt.result) == (Ending.FINISHED, {"doubled": 2 * (place + 1)})
        (call,) = await workplace.stack.store.calls([attempt.key])
        assert (call.agent, call.request["messages"][0]["content"]) == ("far", f"hello {place + 1}")
        (event,) = await workplace.stack.store.rewards([attempt.key])
        assert (event.name, event.value) == ("speed", 0.5)


async def test_the_documented_agent_and_service_work(
    workplace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    agent, service = blocks(PAGE, "python")
    names: dict[str, Any] = {}
    exec(compile(service, PAGE.name, "exec"), names)
    async with serving(names["solve"]) as url:
        (tmp_path / "documented_agent.py").write_text(agent.replace("https://agents.example.com/solve", url))
        runner = TaskPerAttempt(load_agent("documented_agent:solve", tmp_path))
        rollout, attempt = (await workplace.finish(workplace.start_runner(runner), ["2 + 2?"]))[0]
    assert rollout.ending is Ending.FINISHED
    (call,) = await workplace.stack.store.calls([attempt.key])
    assert (call.agent, call.choices[0].message["content"]) == ("solver", attempt.result)


FAILURES = {
    "status 503: overloaded": Response("overloaded", 503),
    "status 302": Response(status_code=302, headers={"location": "/elsewhere"}),
    "what is not JSON: <html>": Response("<html>"),
    "JSON that is no object: [1]": JSONResponse([1]),
    "an object with 'result', and may add 'reward'; it has ['answer']": JSONResponse({"answer": 1}),
    "more than 7340032 bytes": Response(b" " * (8 << 20)),
    "'speed'": JSONResponse({"result": 1, "reward": {"speed": "fast"}}),
}


@ONCE
async def test_what_a_service_does_wrong_ends_its_attempt_and_says_what_it_was(workplace: Any) -> None:
    async def solve(request: Request) -> Response:
        return FAILURES[(await request.json())["task"]]

    async with serving(solve) as url:
        ended = await run(workplace, RemoteAgent(url), list(FAILURES))
    for words, (rollout, attempt) in zip(FAILURES, ended.values(), strict=True):
        assert rollout.ending is Ending.CRASHED
        assert words in attempt.error


@ONCE
async def test_a_refused_connection_ends_the_attempt(workplace: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    rollout, attempt = (await run(workplace, RemoteAgent(f"http://127.0.0.1:{port}/"), [0]))[0]
    assert rollout.ending is Ending.CRASHED
    assert f"The remote agent at http://127.0.0.1:{port}/ cannot be reached (ConnectError" in attempt.error


@pytest.mark.parametrize("workplace", [{"timeout": 2.0, "attempts": 1}], indirect=True)
async def test_a_service_that_takes_too_long_is_left(workplace: Any) -> None:
    left = asyncio.Event()

    async def solve(request: Request) -> Response:
        await request.body()
        while not await request.is_disconnected():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        left.set()
        return Response()

    async with serving(solve) as url:
        rollout, _ = (await run(workplace, RemoteAgent(url), [0]))[0]
        await asyncio.wait_for(left.wait(), 30)
    assert rollout.ending is Ending.TIMED_OUT


def text(*words: str, **fields: Any) -> dict[str, Any]:
    return {"parts": [{"text": each} for each in words], **fields}


def task(state: str, **fields: Any) -> dict[str, Any]:
    return {"id": "t1", "contextId": "c1", "status": {"state": state}, **fields}


@dataclass(frozen=True)
class Version:
    """How a service of one version of A2A answers."""

    protocol: Any
    send: str
    get: str
    state: Callable[[str], str]
    wrapped: bool

    def task(self, state: str, **fields: Any) -> dict[str, Any]:
        found = task(self.state(state), **fields)
        return {"task": found} if self.wrapped else {"kind": "task", **found}

    def message(self, *words: str, **fields: Any) -> dict[str, Any]:
        found = text(*words, messageId="m1", **fields)
        return {"message": found} if self.wrapped else {"kind": "message", **found}


VERSIONS = (
    Version("a2a", "SendMessage", "GetTask", lambda state: f"TASK_STATE_{state.upper().replace('-', '_')}", True),
    Version("a2a-0.3", "message/send", "tasks/get", str, False),
)
BOTH = pytest.mark.parametrize("version", VERSIONS, ids=lambda each: each.protocol)
PAID = {"agl": {"reward": 1}}


@BOTH
async def test_an_a2a_agent_answers_with_a_message_or_a_task(workplace: Any, version: Version) -> None:
    done = version.task("completed", artifacts=[text("four", artifactId="a1")], metadata=PAID)
    answers = {
        "a message": version.message("fo", "ur", metadata=PAID),
        "a task": done,
        "a task that takes its time": version.task("working"),
    }

    async def solve(request: Request) -> Response:
        body = await request.json()
        if body["method"] == version.get:
            assert body["params"] == {"id": "t1"}
            return JSONResponse({"jsonrpc": "2.0", "id": body["id"], "result": done})
        assert body["method"] == version.send
        (part,) = body["params"]["message"]["parts"]
        given = json.loads(part["text"])
        await asked(body["params"]["message"]["metadata"]["agl"], "hello")
        return JSONResponse({"jsonrpc": "2.0", "id": body["id"], "result": answers[given["kind"]]})

    async with serving(solve) as url:
        agent = RemoteAgent(url, protocol=version.protocol)
        ended = await run(workplace, agent, [{"kind": each} for each in answers])
    for rollout, attempt in ended.values():
        assert (rollout.ending, attempt.result) == (Ending.FINISHED, "four")
        (event,) = await workplace.stack.store.rewards([attempt.key])
        assert (event.name, event.value) == ("reward", 1)


@ONCE
@BOTH
async def test_what_an_a2a_agent_does_wrong_ends_its_attempt(workplace: Any, version: Version) -> None:
    other = "a2a" if version.protocol == "a2a-0.3" else "a2a-0.3"
    failed = task(version.state("failed"), status={"state": version.state("failed"), "message": text("no city")})
    failures = {
        "ended its task as failed: no city": {"result": {"task": failed} if version.wrapped else failed},
        "ended its task as input-required": {"result": version.task("input-required")},
        f'another version of A2A: try protocol="{other}"': {"error": {"code": -32601, "message": "no such method"}},
        f'refused {version.send}: {{"code":-32603': {"error": {"code": -32603, "message": "out of order"}},
        "what is no A2A message or task": {"result": 3},
        f"answered {version.send} with what is no A2A": {"result": {"kind": "task", "id": "t1"}},
    }

    async def solve(request: Request) -> Response:
        body = await request.json()
        answer = failures[body["params"]["message"]["parts"][0]["text"]]
        return JSONResponse({"jsonrpc": "2.0", "id": body["id"], **answer})

    async with serving(solve) as url:
        ended = await run(workplace, RemoteAgent(url, protocol=version.protocol), list(failures))
    for words, (rollout, attempt) in zip(failures, ended.values(), strict=True):
        assert rollout.ending is Ending.CRASHED
        assert words in attempt.error


@pytest.mark.parametrize(
    ("given", "words"),
    [({"url": "agents.example.com"}, "'agents.example.com' is no address"), ({"protocol": "grpc"}, "protocol 'grpc'")],
)
def test_a_wrong_address_or_protocol_is_refused_at_once(given: dict[str, Any], words: str) -> None:
    with pytest.raises(AgentError, match=words):
        RemoteAgent(**{"url": "http://agents.example.com", **given})
