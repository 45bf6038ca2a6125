"""Who makes a call, and for which attempt, on every call that the gateway stores of real agents and teams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
import pytest
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent, SocietyOfMindAgent
from autogen_agentchat.base import Response
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_agentchat.teams import (
    DiGraphBuilder,
    GraphFlow,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
)
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_core import AgentId, CancellationToken, MessageContext, RoutedAgent, SingleThreadedAgentRuntime, rpc
from autogen_core.models import SystemMessage, UserMessage

from agl_core.capture import current_identity, identify
from agl_core.testing.scripts import CallTools, Fail, Hold, Say
from agl_core.worker.environment import PLACEHOLDER_KEY

QUESTION = [TextMessage(content="hello", source="user")]


async def by_run_stream(agent: Any) -> None:
    async for _ in agent.run_stream(task="hello"):
        pass


async def by_on_messages(agent: Any) -> None:
    await agent.on_messages(QUESTION, CancellationToken())


def assistant(name: str, client: Any, **options: Any) -> AssistantAgent:
    return AssistantAgent(name, client, system_message=name, **options)


def spoke(call: Any) -> str:
    """The agent's name as its system message, by which tests know who really called."""
    return next(m["content"] for m in call.request["messages"] if m["role"] == "system")


@pytest.mark.parametrize("call", [by_run_stream, by_on_messages])
async def test_an_agent_by_itself(call: Any, world: Any, trial: Any) -> None:
    with trial.running():
        await call(assistant("solver", world.client()))
        assert current_identity() is None
    assert await trial.agents() == ["solver"]
    assert (await trial.calls())[0].prompt_ids is not None


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


@pytest.mark.parametrize("streaming", [False, True])
async def test_parallel_branches_of_a_graph(streaming: bool, world: Any, trial: Any) -> None:
    held = [Hold(), Hold()]
    world.upstream.script(Say("draft"), *held)
    client = world.client()
    writer, critic, editor = (
        assistant(name, client, model_client_stream=streaming) for name in ("writer", "critic", "editor")
    )
    graph = DiGraphBuilder()
    graph.add_node(writer).add_node(critic).add_node(editor).add_edge(writer, critic).add_edge(writer, editor)
    with trial.running():
        run = asyncio.create_task(GraphFlow([writer, critic, editor], graph=graph.build()).run(task="hello"))
        for hold in held:
            await hold.arrived.wait()
        for hold in reversed(held):
            hold.release.set()
        await run
    calls = await trial.calls()
    assert calls[0].agent == "writer"
    assert {call.agent for call in calls} == {"writer", "critic", "editor"}
    assert all(call.agent == spoke(call) for call in calls)


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


async def test_a_team_as_a_tool(world: Any, trial: Any) -> None:
    world.upstream.script(CallTools([("panel", {"task": "why?"})]), Say("a"), Say("b"), Say("c"))
    client = world.client(parallel_tool_calls=False)
    team = RoundRobinGroupChat(
        [assistant("alice", client), assistant("bob", client)], termination_condition=MaxMessageTermination(3)
    )
    boss = assistant("boss", client, tools=[TeamTool(team, "panel", "Ask the panel.")], reflect_on_tool_use=True)
    with trial.running():
        await boss.run(task="hello")
    assert await trial.agents() == ["boss", "alice", "bob", "boss"]


async def test_a_team_in_a_team_and_a_society_of_mind(world: Any, trial: Any) -> None:
    client = world.client()
    inner = RoundRobinGroupChat([assistant("alice", client)], max_turns=1)
    nested = RoundRobinGroupChat([assistant("carol", client)], name="nested", max_turns=1)
    outer = RoundRobinGroupChat([SocietyOfMindAgent("society", inner, client), nested], max_turns=2)
    with trial.running():
        await outer.run(task="hello")
    assert await trial.agents() == ["alice", "society", "carol"]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
async def test_magentic_one(world: Any, trial: Any) -> None:
    ledger = {
        name: {"reason": "", "answer": answer}
        for name, answer in {
            "is_request_satisfied": True,
            "is_in_loop": False,
            "is_progress_being_made": True,
            "next_speaker": "alice",
            "instruction_or_question": "",
        }.items()
    }
    world.upstream.script(Say("facts"), Say("plan"), Say(openai.BaseModel.model_validate(ledger).model_dump_json()))
    client = world.client()
    with trial.running():
        await MagenticOneGroupChat([assistant("alice", client)], model_client=client).run(task="hello")
    assert set(await trial.agents()) == {"MagenticOneOrchestrator"}


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


async def test_a_tool_in_a_thread_speaks_for_its_agent(world: Any, trial: Any) -> None:
    world.upstream.script(CallTools([("think", {})]), Say("thought"))

    def think() -> str:
        """Think."""
        client = openai.OpenAI(base_url=world.stack.url(), api_key=PLACEHOLDER_KEY)
        reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hm"}])
        return reply.choices[0].message.content or ""

    with trial.running():
        await assistant("solver", world.client(), tools=[think]).run(task="hello")
    assert await trial.agents() == ["solver", "solver"]


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


async def test_a_stream_that_is_left_early_leaves_no_identity(world: Any, trial: Any) -> None:
    agent = assistant("cut", world.client(), model_client_stream=True)
    with trial.running():
        items = agent.on_messages_stream(QUESTION, CancellationToken())
        await anext(items)
        await items.aclose()
        assert current_identity() is None
        with pytest.raises(StopAsyncIteration):
            await anext(items)
    assert await trial.agents() == ["cut"]


async def test_a_name_given_around_an_agent_is_not_the_agents(world: Any, trial: Any) -> None:
    client = world.client()
    with trial.running(), identify("outer"):
        await assistant("solver", client).run(task="hello")
        await client.create([UserMessage(content="hello", source="user")])
    assert await trial.agents() == ["solver", "outer"]


async def test_a_failed_call_is_the_agents_and_the_users_exception(world: Any, trial: Any) -> None:
    world.upstream.script(Fail(400))
    with trial.running():
        with pytest.raises(openai.BadRequestError):
            await assistant("unlucky", world.client()).run(task="hello")
        assert current_identity() is None


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


async def test_outside_a_rollout_nothing_is_stamped(world: Any, trial: Any, model_client: Any) -> None:
    sent: list[httpx2.Request] = []

    async def note(request: httpx2.Request) -> None:
        sent.append(request)

    http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [note]})
    url = world.stack.url(trial.key)
    await assistant("solver", model_client(url, world.stack.key(trial.key), http_client=http)).run(task="hello")
    assert [name for name in sent[0].headers if name.startswith("x-agl")] == []
    assert await trial.agents() == [None]
