"""The server of the A2A SDK, with an agent that runs there and calls models for the attempt of each task.

`make test-frameworks` runs it in an environment of its own, with the newest release.
"""

from __future__ import annotations

import contextlib

import pytest
from a2a.helpers import get_message_text, new_task_from_user_message, new_text_message, new_text_part
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandlerV2
from a2a.server.routes import create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types.a2a_pb2 import AgentCapabilities, AgentCard, AgentInterface
from google.protobuf.json_format import MessageToDict

from agl_core.errors import AgentError
from agl_remote import RemoteAgent
from agl_server.testing import running_stack

from .services import ask_model, roll_out, serving


class Solver(AgentExecutor):
    """Answers at once, or by a task; `fail` fails."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        question = get_message_text(context.message)
        if question == "fail":
            task = new_task_from_user_message(context.message)
            await event_queue.enqueue_event(task)
            await TaskUpdater(event_queue, task.id, task.context_id).failed(new_text_message("no such city"))
            return
        answer, paid = await ask_model(MessageToDict(context.message.metadata)["agl"], question), {"agl": {"reward": 1}}
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


def serving_a2a() -> contextlib.AbstractAsyncContextManager[str]:
    """The address of an A2A server."""
    interface = AgentInterface(url="http://127.0.0.1/", protocol_binding="JSONRPC", protocol_version="1.0")
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
    return serving(*create_jsonrpc_routes(handler, "/"))


async def test_a_service_of_the_sdk_is_an_agent() -> None:
    async with serving_a2a() as url, running_stack() as stack:
        for task in ("a message", "a task"):
            result, rewards, (call,) = await roll_out(stack, RemoteAgent(url, protocol="a2a"), task)
            assert (call.agent, call.request["messages"][0]["content"]) == ("far", task)
            assert (result, rewards) == (call.choices[0].message["content"], {"reward": 1})


async def test_a_task_that_fails_is_the_agents_failure() -> None:
    async with serving_a2a() as url, running_stack() as stack:
        with pytest.raises(AgentError, match="ended its task as failed: no such city"):
            await roll_out(stack, RemoteAgent(url, protocol="a2a"), "fail")
