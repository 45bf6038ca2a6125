"""Who calls, for which attempt, and what the tools did: agents of AgentChat, of one's own, on runtimes; and episodes
without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import openai
import pytest
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import BaseChatMessage, TextMessage, ToolCallExecutionEvent
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core import AgentId, MessageContext, RoutedAgent, SingleThreadedAgentRuntime, rpc
from autogen_core.models import ModelInfo, UserMessage
from autogen_core.tool_agent import ToolAgent, tool_agent_caller_loop
from autogen_core.tools import FunctionTool, StaticWorkbench, TextResultContent, ToolOverride, ToolResult
from autogen_ext.models.openai import OpenAIChatCompletionClient
from running_servers import leased_attempt, stack_fixture  # noqa: F401

from agl_autogen import plugin, record
from agl_core.capture import current_attempt, current_identity
from agl_core.client.agent import PLACEHOLDER_KEY
from agl_core.testing.scripts import CallTools, Fail, Say
from agl_core.types import Ending
from agl_server.testing import Stack, no_problems  # noqa: F401

MODEL = ModelInfo(vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True)


a_stack = stack_fixture(plugin.autogen_core, plugin.agentchat)


@pytest.fixture
def clients(stack: Stack) -> Callable[..., OpenAIChatCompletionClient]:
    """Makes clients with the server's URL alone: which attempt calls, its headers must tell."""
    options = {"model": "m", "model_info": MODEL, "base_url": stack.url(), "api_key": PLACEHOLDER_KEY, "max_retries": 0}
    return partial(OpenAIChatCompletionClient, **options)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def broken() -> str:
    """Fail."""
    raise ValueError("boom")


def assistant(name: str, client: Any, **options: Any) -> AssistantAgent:
    return AssistantAgent(name, client, system_message=name, **options)


async def test_the_selector_goes_by_autogens_name_for_it(stack: Any, clients: Any, attempt: Any) -> None:
    stack.upstream.script(Say("bob"), Say("I am bob."))
    client = clients()
    with attempt.running():
        team = SelectorGroupChat(
            [assistant("alice", client), assistant("bob", client)],
            model_client=client,
            termination_condition=MaxMessageTermination(2),
        )
        await team.run(task="hello")
    assert await attempt.agents() == ["SelectorGroupChatManager", "bob"]


async def test_who_reads_a_stream_is_not_the_agent(stack: Any, clients: Any, attempt: Any) -> None:
    stack.upstream.script(CallTools([("expert", {"task": "why?"})]), Say("because"), Say("so"))
    client = clients(parallel_tool_calls=False)
    expert = assistant("expert", client, model_client_stream=True)
    boss = assistant("boss", client, tools=[AgentTool(expert)], reflect_on_tool_use=True, model_client_stream=True)
    with attempt.running():
        async for _ in boss.run_stream(task="hello"):
            # The agents work between two items; who consumes them is not one of them.
            assert current_identity() is None
    assert await attempt.agents() == ["boss", "expert", "boss"]


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


async def test_agents_of_the_users_own_classes(stack: Any, clients: Any, attempt: Any) -> None:
    class Later(Own):
        """One that inherits what is watched, made after agl attached."""

    raw = openai.AsyncOpenAI(base_url=stack.url(), api_key=PLACEHOLDER_KEY)
    client = clients()

    async def by_sdk() -> str:
        reply = await raw.chat.completions.create(model="m", messages=[{"role": "user", "content": "raw"}])
        return reply.choices[0].message.content or ""

    async def by_client() -> str:
        return str((await client.create([UserMessage(content="hello", source="user")])).content)

    with attempt.running():
        await by_client()
        await RoundRobinGroupChat([Own("early", by_client), Later("later", by_sdk)], max_turns=2).run(task="hello")
        await Later("direct", by_sdk).run(task="hello")
        await by_sdk()
    assert await attempt.agents() == [None, "early", "later", "direct", None]


class Worker(RoutedAgent):
    """An agent of AutoGen's core, whose tools another agent runs."""

    def __init__(self, client: Any, tools: list[FunctionTool]) -> None:
        super().__init__("works")
        self._client, self._tools = client, tools

    @rpc
    async def handle(self, message: UserMessage, ctx: MessageContext) -> str:
        messages = await tool_agent_caller_loop(
            self,
            tool_agent_id=AgentId("toolbox", self.id.key),
            model_client=self._client,
            input_messages=[message],
            tool_schema=self._tools,
        )
        return str(messages[-1].content)


async def test_a_runtime_shared_by_rollouts_whose_agents_have_another_one_run_their_tools(
    stack: Any, clients: Any
) -> None:
    client, runtime = clients(), SingleThreadedAgentRuntime()
    tools = [FunctionTool(add, "Add."), FunctionTool(broken, "Fail.")]
    await ToolAgent.register(runtime, "toolbox", lambda: ToolAgent("runs tools", list(tools)))
    await Worker.register(runtime, "worker", lambda: Worker(client, tools))
    stack.upstream.answer = lambda received: (
        Say("3") if received.turns else CallTools([("add", {"a": 1, "b": 2}), ("broken", {})])
    )
    attempts = [await stack.attempt() for _ in range(3)]

    async def ask(text: str) -> Any:
        return await runtime.send_message(UserMessage(content=text, source="user"), AgentId("worker", "default"))

    async def one(attempt: Any) -> None:
        with attempt.running():
            assert await ask(attempt.key.rollout) == "3"

    with attempts[0].running():
        runtime.start()
    await asyncio.gather(*map(one, attempts))
    # It belongs to no rollout, although the runtime's task was started in one.
    with pytest.raises(openai.AuthenticationError, match="a key of its own"):
        await ask("outside")
    await runtime.stop()
    for attempt in attempts:
        first, second = (await attempt.close()).transitions
        assert first.messages[-1]["content"] == attempt.key.rollout
        assert [t.agent for t in (first, second)] == ["worker", "worker"]
        assert [(o.tool, str(o.status), o.agent) for o in first.tool_results] == [
            ("add", "ok", "worker"),
            ("broken", "error", "worker"),
        ]


async def test_what_the_program_sees_is_the_same(stack: Any, clients: Any, attempt: Any) -> None:
    client = clients(default_headers={"Authorization": f"Bearer {stack.key(attempt.key)}"})

    async def seen() -> list[Any]:
        stack.upstream.script(CallTools([("add", {"a": 1, "b": 2}), ("broken", {}), ("lost", {})]), Say("done"))
        agent = AssistantAgent("solver", client, tools=[add, broken], reflect_on_tool_use=True)
        events: list[Any] = []
        async for item in agent.run_stream(task="hello"):
            results = item.content if isinstance(item, ToolCallExecutionEvent) else ()
            events.append((type(item), [(result.name, result.content, result.is_error) for result in results]))
        return events

    unwatched = await seen()
    assert attempt.tool_results == ()
    with attempt.running():
        assert await seen() == unwatched
    assert len(attempt.tool_results) == 2


class Remote(StaticWorkbench):
    """A workbench of the user's own, whose tools are elsewhere, as those of an MCP server are."""

    def __init__(self, outcome: str | Exception, is_error: bool = False) -> None:
        super().__init__([FunctionTool(add, "Fetch.", name="fetch")])
        self._outcome, self._is_error = outcome, is_error

    async def call_tool(
        self, name: str, arguments: Any = None, cancellation_token: Any = None, call_id: str | None = None
    ) -> ToolResult:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return ToolResult(name=name, result=[TextResultContent(content=self._outcome)], is_error=self._is_error)


RENAMED = StaticWorkbench([FunctionTool(add, "Add.")], tool_overrides={"add": ToolOverride(name="plus")})


@pytest.mark.parametrize("in_team", [False, True], ids=["alone", "streaming in a team"])
@pytest.mark.parametrize(
    ("workbench", "call", "expected"),
    [
        (RENAMED, ("plus", {"a": 1, "b": 2}), ("plus", "ok", "3")),
        (Remote("Error: said the page"), ("fetch", {"url": "x"}), ("fetch", "error", "Error: said the page")),
        (Remote("no such page", is_error=True), ("fetch", {"url": "x"}), ("fetch", "error", "no such page")),
    ],
    ids=["renamed", "in words", "marked"],
)
async def test_results_of_a_workbench_go_by_the_name_that_the_model_knows(
    stack: Any, clients: Any, attempt: Any, in_team: bool, workbench: Any, call: Any, expected: tuple[str, ...]
) -> None:
    stack.upstream.script(CallTools([call]), Say("done"))
    agent = AssistantAgent("solver", clients(), workbench=workbench, model_client_stream=in_team)
    with attempt.running():
        await (RoundRobinGroupChat([agent], max_turns=1) if in_team else agent).run(task="hello")
    episode = await attempt.close()
    assert (episode.unjoined, len(attempt.tool_results)) == ((), 1)
    (result,) = episode.transitions[0].tool_results
    assert (result.tool, str(result.status), result.result) == expected


async def test_a_workbench_that_raises_is_recorded_and_still_raises(attempt: Any) -> None:
    with attempt.running(), pytest.raises(ConnectionError, match="gone"):
        # Not in an AssistantAgent: AutoGen 0.7.5 waits forever for a workbench that raises.
        await Remote(ConnectionError("gone")).call_tool("fetch", {}, call_id="c1")
    assert [(o.tool, str(o.status), o.error) for o in attempt.tool_results] == [
        ("fetch", "error", "ConnectionError: gone")
    ]


async def test_a_block_is_an_episode_also_if_its_agent_crashes(stack: Any, clients: Any) -> None:
    stack.upstream.script(Say("3"), Say("before"), Fail(400))
    agent = AssistantAgent("solver", clients(base_url=stack.upstream.url))
    with record("1 + 2?") as recorded:
        recorded.result = (await agent.run(task="1 + 2?")).messages[-1].to_text()
        assert recorded.episode() is None
    with pytest.raises(RuntimeError, match="400"), record() as crashed:
        await RoundRobinGroupChat([agent], max_turns=2).run(task="hello")

    episode = recorded.episode()
    assert (episode.ending, episode.task.input, episode.result) == (Ending.FINISHED, "1 + 2?", "3")
    assert crashed.episode().ending is Ending.CRASHED
    assert [t.response["content"] for t in crashed.transitions()] == ["before"]
    assert current_attempt() is None
