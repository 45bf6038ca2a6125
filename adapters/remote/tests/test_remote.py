"""Agents that run as services elsewhere: they get the task and the way to the model; their failures are the agent's."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from testing_aids import blocks

from agl_core.errors import AgentError
from agl_remote import RemoteAgent
from agl_server.testing import Stack, running_stack

from .services import ask_model, roll_out, serving

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


def at(answer: Any) -> Any:
    """A service that answers each request by `answer(request)`."""
    return serving(Route("/", answer, methods=["POST"]))


async def test_a_service_calls_the_model_for_its_attempt_and_reports_a_reward(stack: Stack) -> None:
    async def solve(request: Request) -> Response:
        body = await request.json()
        assert request.headers["x-service-key"] == "secret"
        await ask_model(body, f"hello {body['task']['number']}")
        return JSONResponse({"result": {"doubled": 2 * body["task"]["number"]}, "reward": {"speed": 0.5}})

    async with at(solve) as url:
        agent = RemoteAgent(url, headers={"x-service-key": "secret"})
        for number in (1, 2):
            result, rewards, (call,) = await roll_out(stack, agent, {"number": number})
            assert (result, rewards) == ({"doubled": 2 * number}, {"speed": 0.5})
            assert (call.agent, call.request["messages"][0]["content"]) == ("far", f"hello {number}")


async def test_the_documented_agent_and_service_work(stack: Stack) -> None:
    names: dict[str, Any] = {}
    agent, service = blocks(README, "python")
    exec(compile(service, README.name, "exec"), names)
    async with at(names["solve"]) as url:
        exec(agent.replace("https://agents.example.com/solve", url), names)
        result, _, (call,) = await roll_out(stack, names["solve"], "2 + 2?")
    assert (call.agent, call.choices[0].message["content"]) == ("solver", result)


FAILURES = {
    "status 503: overloaded": Response("overloaded", 503),
    "status 302": Response(status_code=302, headers={"location": "/elsewhere"}),
    "what is not JSON: <html>": Response("<html>"),
    "JSON that is no object: [1]": JSONResponse([1]),
    "an object with 'result', and may add 'reward'; it has ['answer']": JSONResponse({"answer": 1}),
    "more than 7340032 bytes": Response(b" " * (8 << 20)),
    "'speed'": JSONResponse({"result": 1, "reward": {"speed": "fast"}}),
}


async def test_what_a_service_does_wrong_is_said(stack: Stack) -> None:
    async def solve(request: Request) -> Response:
        return FAILURES[(await request.json())["task"]]

    async with at(solve) as url:
        for words in FAILURES:
            with pytest.raises(AgentError) as failure:
                await roll_out(stack, RemoteAgent(url), words)
            assert words in str(failure.value)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    with pytest.raises(AgentError, match=f"The remote agent at {url} cannot be reached .ConnectError"):
        await roll_out(stack, RemoteAgent(url), 0)


def text(*words: str, **fields: Any) -> dict[str, Any]:
    return {"parts": [{"text": word} for word in words], **fields}


def task_in(state: str, message: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    status = {"state": f"TASK_STATE_{state.upper().replace('-', '_')}", "message": message}
    return {"task": {"id": "t1", "contextId": "c1", "status": status, **fields}}


PAID = {"agl": {"reward": 1}}


async def test_an_a2a_agent_answers_with_a_message_or_a_task(stack: Stack) -> None:
    done = task_in("completed", artifacts=[text("four", artifactId="a1")], metadata=PAID)
    answers = {
        "a message": {"message": text("fo", "ur", messageId="m1", metadata=PAID)},
        "a task": done,
        "a task that takes its time": task_in("working"),
    }

    async def solve(request: Request) -> Response:
        body = await request.json()
        if body["method"] == "GetTask":
            assert body["params"] == {"id": "t1"}
            return JSONResponse({"jsonrpc": "2.0", "id": body["id"], "result": done})
        assert body["method"] == "SendMessage"
        message = body["params"]["message"]
        await ask_model(message["metadata"]["agl"], "hello")
        answer = answers[json.loads(message["parts"][0]["text"])["kind"]]
        return JSONResponse({"jsonrpc": "2.0", "id": body["id"], "result": answer})

    async with at(solve) as url:
        for kind in answers:
            result, rewards, calls = await roll_out(stack, RemoteAgent(url, protocol="a2a"), {"kind": kind})
            assert (result, rewards, len(calls)) == ("four", {"reward": 1}, 1)


async def test_what_an_a2a_agent_does_wrong_is_said(stack: Stack) -> None:
    failures = {
        "ended its task as failed: no city": {"result": task_in("failed", text("no city"))},
        "ended its task as input-required": {"result": task_in("input-required")},
        'refused SendMessage: {"code":-32603': {"error": {"code": -32603, "message": "out of order"}},
        "what is no A2A message or task": {"result": 3},
        "answered SendMessage with what is no A2A": {"result": {"kind": "task", "id": "t1"}},
    }

    async def solve(request: Request) -> Response:
        body = await request.json()
        answer = failures[body["params"]["message"]["parts"][0]["text"]]
        return JSONResponse({"jsonrpc": "2.0", "id": body["id"], **answer})

    async with at(solve) as url:
        for words in failures:
            with pytest.raises(AgentError) as failure:
                await roll_out(stack, RemoteAgent(url, protocol="a2a"), words)
            assert words in str(failure.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [({"url": "agents.example.com"}, "'agents.example.com' is no address"), ({"protocol": "grpc"}, "protocol 'grpc'")],
)
def test_a_wrong_address_or_protocol_is_refused_at_once(given: dict[str, Any], words: str) -> None:
    with pytest.raises(AgentError, match=words):
        RemoteAgent(**{"url": "http://agents.example.com", **given})
