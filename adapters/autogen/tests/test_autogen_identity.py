"""Who makes a call, and for which attempt, on every call that the gateway stores of real agents and teams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_agentchat.teams import (
    RoundRobinGroupChat,
    SelectorGroupChat,
)
from autogen_agentchat.tools import AgentTool
from autogen_core import AgentId, CancellationToken, MessageContext, RoutedAgent, SingleThreadedAgentRuntime, rpc
from autogen_core.models import SystemMessage, UserMessage

from agl_core.capture import current_identity
from agl_core.testing.scripts import CallTools, Hold, Say
from agl_core.worker.agent import PLACEHOLDER_KEY


def assistant(name: str, client: Any, **options: Any) -> AssistantAgent:
    return AssistantAgent(name, client, system_message=name, **options)


def spoke(call: Any) -> str:
    """The agent's name as its system message, by which tests know who really called."""
    return next(m["content"] for m in call.request["messages"] if m["role"] == "system")


async def test_the_selector_goes_by_autogens_name_for_it(world: Any, trial: Any) -> None:
    world.upstream.script(Say("bob"), Say("I am bob."))
    client = world.client()
    with trial.running():
        team = SelectorGroupChat(
            [assistant("alice", client), assistant("bob", client)],
            model_client=client,
            termination_condition=MaxMessageTermination(2),
        )
        await team.run(task="hello")
    assert await trial.agents() == ["SelectorGroupChatManager", "bob"]


async def test_who_reads_a_stream_is_not_the_agent(world: Any, trial: Any) -> None:
    world.upstream.script(CallTools([("expert", {"task": "why?"})]), Say("because"), Say("so"))
    client = world.client(parallel_tool_calls=False)
    expert = assistant("expert", client, model_client_stream=True)
    boss = assistant("boss", client, tools=[AgentTool(expert)], reflect_on_tool_use=True, model_client_stream=True)
    with trial.running():
        async for _ in boss.run_stream(task="hello"):
            # The agents work between two items; who consumes them is not one of them.
            assert current_identity() is None
    assert await trial.agents() == ["boss", "expert", "boss"]


class Own(BaseChatAgent):
    """An agent of the user's own, which calls the model itself."""

    def __init__(self, name: str, call: Any) -> None:
        super().__init__(name, "")
        self._call = call

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        return (TextMessage,)

    async def on_messages(self, messages: Sequence[BaseChatMessage], cancellation_token: Any) -> Response:
        return Response(chat_message=TextMessage(content=await self._call(), source=self.name))

    async def on_reset(self, cancellation_token: Any) -> None: ...


async def test_agents_of_the_users_own_classes(world: Any, trial: Any) -> None:
    class Later(Own):
        async def on_messages(self, messages: Sequence[BaseChatMessage], cancellation_token: Any) -> Response:
            return Response(chat_message=TextMessage(content=await self._call(), source=self.name))

    raw = openai.AsyncOpenAI(base_url=world.stack.url(), api_key=PLACEHOLDER_KEY)
    client = world.client()

    async def by_sdk() -> str:
        reply = await raw.chat.completions.create(model="m", messages=[{"role": "user", "content": "raw"}])
        return reply.choices[0].message.content or ""

    async def by_client() -> str:
        return str((await client.create([UserMessage(content="hello", source="user")])).content)

    with trial.running():
        await by_client()
        await RoundRobinGroupChat([Own("early", by_client), Later("later", by_sdk)], max_turns=2).run(task="hello")
        await Later("direct", by_sdk).run(task="hello")
        await by_sdk()
    assert await trial.agents() == [None, "early", "later", "direct", None]


@dataclass
class Ask:
    text: str


class Worker(RoutedAgent):
    """An agent of AutoGen's core, without AgentChat."""

    def __init__(self, client: Any) -> None:
        super().__init__("works")
        self._client = client

    @rpc
    async def handle(self, message: Ask, ctx: MessageContext) -> str:
        return str((await self._client.create([SystemMessage(content=message.text)])).content)


async def test_a_runtime_shared_by_rollouts_and_started_in_the_first(world: Any) -> None:
    runtime = SingleThreadedAgentRuntime()
    client = world.client()
    await Worker.register(runtime, "worker", lambda: Worker(client))
    trials = [await world.trial() for _ in range(3)]

    async def one(trial: Any) -> None:
        with trial.running():
            await runtime.send_message(Ask(trial.key.rollout), AgentId("worker", "default"))

    with trials[0].running():
        runtime.start()
    await asyncio.gather(*map(one, trials))
    # It belongs to no rollout, although the runtime's task was started in one.
    with pytest.raises(openai.AuthenticationError, match="a key of its own"):
        await runtime.send_message(Ask("outside"), AgentId("worker", "default"))
    await runtime.stop()
    for trial in trials:
        assert [(call.agent, spoke(call)) for call in await trial.calls()] == [("worker", trial.key.rollout)]


async def test_cancelling_reaches_the_user(world: Any, trial: Any) -> None:
    hold, token = Hold(), CancellationToken()
    world.upstream.script(hold)
    with trial.running():
        run = asyncio.create_task(assistant("slow", world.client()).run(task="hello", cancellation_token=token))
        await hold.arrived.wait()
        token.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    hold.release.set()
    assert trial.tool_results == ()
