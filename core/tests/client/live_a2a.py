"""The server of the A2A SDK, with an agent that runs there and calls models for the attempt of each task.

`make test-frameworks` runs it in an environment of its own, with the newest release.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import uvicorn
from a2a.helpers import get_message_text, new_task_from_user_message, new_text_message, new_text_part
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandlerV2
from a2a.server.routes import create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types.a2a_pb2 import AgentCapabilities, AgentCard, AgentInterface
from google.protobuf.json_format import MessageToDict
from starlette.applications import Starlette

from agl_core.types import Ending
from agl_core.worker import Agent, RemoteAgent, TaskPerAttempt

BOTH = pytest.mark.parametrize(("protocol", "version"), [("a2a", "1.0"), ("a2a-0.3", "0.3")])


class Solver(AgentExecutor):
    """Answers at once, or by a task; `fail` fails."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        question = get_message_text(context.message)
        if question == "fail":
            task = new_task_from_user_message(context.message)
            await event_queue.enqueue_event(task)
            await TaskUpdater(event_queue, task.id, task.context_id).failed(new_text_message("no such city"))
            return
        answer, paid = await self._ask(MessageToDict(context.message.metadata)["agl"], question), {"agl": {"reward": 1}}
        if question == "a message":
            message = new_text_message(answer)
            message.metadata.update(paid)
            await event_queue.enqueue_event(message)
            return
        task = new_task_from_user_message(context.message)
        await event_queue.enqueue_event(task)
        updater = TaskUpdater(event_queue, task.id, task.context_id)
        await updater.start_work()
        await updater.add_artifact([new_text_part(answer)], metadata=paid)
        await updater.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        raise NotImplementedError

    async def _ask(self, attempt: dict[str, Any], question: str) -> str:
        headers = {**attempt["headers"], "x-agl-agent": "far"}
        client = {"base_url": attempt["base_url"], "api_key": attempt["api_key"], "default_headers": headers}
        async with openai.AsyncOpenAI(**client) as model:
            reply = await model.chat.completions.create(
                model="default", messages=[{"role": "user", "content": question}]
            )
        return str(reply.choices[0].message.content)


@contextlib.asynccontextmanager
async def serving(version: str) -> AsyncIterator[str]:
    """The address of an A2A server."""
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    interface = AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version=version)
    card = AgentCard(
        name="solver",
        description="Solves.",
        version="1",
        supported_interfaces=[interface],
        capabilities=AgentCapabilities(),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
    )
    handler = DefaultRequestHandlerV2(Solver(), InMemoryTaskStore(), card)
    routes = create_jsonrpc_routes(handler, "/", enable_v0_3_compat=version == "0.3")
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="critical"))
    running = asyncio.create_task(server.serve([listening]))
    try:
        yield url
    finally:
        server.should_exit = True
        await running


async def run(workplace: Any, url: str, protocol: Any, tasks: list[str]) -> Any:
    agent = RemoteAgent(url, protocol=protocol)
    runner = TaskPerAttempt(Agent("test:agent", agent, wants_context=True, is_async=True))
    return await workplace.finish(workplace.start_runner(runner), tasks)


@BOTH
async def test_a_service_of_the_sdk_is_an_agent(workplace: Any, protocol: str, version: str) -> None:
    tasks = ["a message", "a task"]
    async with serving(version) as url:
        ended = await run(workplace, url, protocol, tasks)
    for place, (rollout, attempt) in ended.items():
        (call,) = await workplace.stack.store.calls([attempt.key])
        assert (call.agent, call.request["messages"][0]["content"]) == ("far", tasks[place])
        assert (rollout.ending, attempt.result) == (Ending.FINISHED, call.choices[0].message["content"])
        (event,) = await workplace.stack.store.rewards([attempt.key])
        assert (event.name, event.value) == ("reward", 1)


@BOTH
@pytest.mark.parametrize("workplace", [{"attempts": 1}], indirect=True)
async def test_a_task_that_fails_ends_its_attempt(workplace: Any, protocol: str, version: str) -> None:
    async with serving(version) as url:
        rollout, attempt = (await run(workplace, url, protocol, ["fail"]))[0]
    assert rollout.ending is Ending.CRASHED
    assert "ended its task as failed: no such city" in attempt.error


@pytest.mark.parametrize("workplace", [{"attempts": 1}], indirect=True)
async def test_a_service_of_another_version_says_which_protocol_to_use(workplace: Any) -> None:
    async with serving("1.0") as url:
        rollout, attempt = (await run(workplace, url, "a2a-0.3", ["a task"]))[0]
    assert rollout.ending is Ending.CRASHED
    assert 'try protocol="a2a"' in attempt.error
