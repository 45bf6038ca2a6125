"""Who calls, for which attempt, and what the tools did: agents of AgentChat, of one's own, on runtimes; and episodes
without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
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

from agl_autogen import plugin, record
from agl_core.capture import current_attempt, current_identity
from agl_core.client.agent import PLACEHOLDER_KEY
from agl_core.testing.scripts import CallTools, Fail, Say
from agl_core.types import Ending, ToolStatus
from agl_server.testing import LeasedAttempt, Stack, attached_stack, no_problems  # noqa: F401

MODEL = ModelInfo(vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with attached_stack(plugin.autogen_core, plugin.agentchat) as stack:
        yield stack


@pytest.fixture
async def trial(stack: Stack) -> LeasedAttempt:
    return await stack.attempt()


@pytest.fixture
def clients(stack: Stack) -> Callable[..., OpenAIChatCompletionClient]:
    """Makes clients with the server's URL alone: which attempt calls, its headers must tell."""
    options = {"model": "m", "model_info": MODEL, "base_url": stack.url(), "api_key": PLACEHOLDER_KEY, "max_retries": 0}
    return partial(OpenAIChatCompletionClient, **options)


@pytest.fixture(params=["alone", "streaming in a team"])
def run(request: pytest.FixtureRequest, stack: Any, clients: Any, trial: Any) -> Callable[..., Any]:
    """Runs an agent whose model asks for the given tools; gives the tool results, all joined with its first call."""

    async def run(*calls: tuple[str, Mapping[str, Any]], tools: Any = None, **options: Any) -> Sequence[Any]:
        stack.upstream.script(CallTools(calls), Say("done"))
        in_team = request.param != "alone"
        agent = AssistantAgent("solver", clients(), tools=tools, model_client_stream=in_team, **options)
        with trial.running():
            await (RoundRobinGroupChat([agent], max_turns=1) if in_team else agent).run(task="hello")
        episode = await trial.close()
        assert episode.unjoined == ()
        assert len(trial.tool_results) == len(episode.transitions[0].tool_results)
        return episode.transitions[0].tool_results

    return run


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def broken() -> str:
    """Fail."""
    raise ValueError("boom")


def assistant(name: str, client: Any, **options: Any) -> AssistantAgent:
    return AssistantAgent(name, client, system_message=name, **options)


async def test_the_selector_goes_by_autogens_name_for_it(stack: Any, clients: Any, trial: Any) -> None:
    stack.upstream.script(Say("bob"), Say("I am bob."))
    client = clients()
    with trial.running():
        team = SelectorGroupChat(
            [assistant("alice", client), assistant("bob", client)],
            model_client=client,
            termination_condition=MaxMessageTermination(2),
        )
        await team.run(task="hello")
    assert await trial.agents() == ["SelectorGroupChatManager", "bob"]


async def test_who_reads_a_stream_is_not_the_agent(stack: Any, clients: Any, trial: Any) -> None:
    stack.upstream.script(CallTools([("expert", {"task": "why?"})]), Say("because"), Say("so"))
    client = clients(parallel_tool_calls=False)
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


async def test_agents_of_the_users_own_classes(stack: Any, clients: Any, trial: Any) -> None:
    class Later(Own):
        """One that inherits what is watched, made after agl attached."""

    raw = openai.AsyncOpenAI(base_url=stack.url(), api_key=PLACEHOLDER_KEY)
    client = clients()

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
    """An agent of AutoGen's core, whose tools another agent runs."""

    def __init__(self, client: Any, tools: list[FunctionTool]) -> None:
        super().__init__("works")
        self._client, self._tools = client, tools

    @rpc
    async def handle(self, message: Ask, ctx: MessageContext) -> str:
        messages = await tool_agent_caller_loop(
            self,
            tool_agent_id=AgentId("toolbox", self.id.key),
            model_client=self._client,
            input_messages=[UserMessage(content=message.text, source="user")],
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
    trials = [await stack.attempt() for _ in range(3)]

    async def one(trial: Any) -> None:
        with trial.running():
            assert await runtime.send_message(Ask(trial.key.rollout), AgentId("worker", "default")) == "3"

    with trials[0].running():
        runtime.start()
    await asyncio.gather(*map(one, trials))
    # It belongs to no rollout, although the runtime's task was started in one.
    with pytest.raises(openai.AuthenticationError, match="a key of its own"):
        await runtime.send_message(Ask("outside"), AgentId("worker", "default"))
    await runtime.stop()
    for trial in trials:
        first, second = (await trial.close()).transitions
        assert first.messages[-1]["content"] == trial.key.rollout
        assert [t.agent for t in (first, second)] == ["worker", "worker"]
        assert [(o.tool, str(o.status), o.agent) for o in first.tool_results] == [
            ("add", "ok", "worker"),
            ("broken", "error", "worker"),
        ]


async def test_what_the_program_sees_is_the_same(stack: Any, clients: Any, trial: Any) -> None:
    client = clients(default_headers={"Authorization": f"Bearer {stack.key(trial.key)}"})

    async def seen() -> list[Any]:
        stack.upstream.script(CallTools([("add", {"a": 1, "b": 2}), ("broken", {}), ("lost", {})]), Say("done"))
        agent = AssistantAgent("solver", client, tools=[add, broken], reflect_on_tool_use=True)
        events: list[Any] = []
        async for item in agent.run_stream(task="hello"):
            results = item.content if isinstance(item, ToolCallExecutionEvent) else ()
            events.append((type(item), [(result.name, result.content, result.is_error) for result in results]))
        return events

    unwatched = await seen()
    assert trial.tool_results == ()
    with trial.running():
        assert await seen() == unwatched
    assert len(trial.tool_results) == 2


async def test_an_override_goes_by_the_name_that_the_model_knows(run: Any) -> None:
    tool = FunctionTool(add, "Add.")
    workbench = StaticWorkbench([tool], tool_overrides={"add": ToolOverride(name="plus")})
    (tool_result,) = await run(("plus", {"a": 1, "b": 2}), workbench=workbench)
    assert (tool_result.tool, tool_result.result) == ("plus", "3")


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


@pytest.mark.parametrize(
    ("text", "is_error", "status"),
    [
        ("Error: said the page", False, ToolStatus.ERROR),
        ("no such page", True, ToolStatus.ERROR),
    ],
)
async def test_a_workbench_of_the_users_own(text: str, is_error: bool, status: ToolStatus, run: Any) -> None:
    (tool_result,) = await run(("fetch", {"url": "x"}), workbench=Remote(text, is_error))
    assert (tool_result.tool, tool_result.status, tool_result.result) == ("fetch", status, text)


async def test_a_workbench_that_raises_is_recorded_and_still_raises(trial: Any) -> None:
    with trial.running(), pytest.raises(ConnectionError, match="gone"):
        # Not in an AssistantAgent: AutoGen 0.7.5 waits forever for a workbench that raises.
        await Remote(ConnectionError("gone")).call_tool("fetch", {}, call_id="c1")
    assert [(o.tool, str(o.status), o.error) for o in trial.tool_results] == [
        ("fetch", "error", "ConnectionError: gone")
    ]


async def test_a_block_is_an_episode(stack: Any, clients: Any) -> None:
    endpoint = stack.upstream
    endpoint.script(CallTools([("add", {"a": 1, "b": 2})]), Say("3"))
    agent = AssistantAgent("solver", clients(base_url=endpoint.url), tools=[add], reflect_on_tool_use=True)
    with record("1 + 2?") as recorded:
        recorded.result = (await agent.run(task="1 + 2?")).messages[-1].to_text()
        assert recorded.episode() is None

    episode = recorded.episode()
    assert episode is not None
    assert (episode.ending, episode.task.input, episode.result) == (Ending.FINISHED, "1 + 2?", "3")
    first, second = recorded.transitions()
    assert [(t.agent, t.has_ids) for t in (first, second)] == [("solver", True)] * 2
    assert [(o.tool, o.result, str(o.status)) for o in first.tool_results] == [("add", "3", "ok")]


async def test_an_agent_that_crashes(stack: Any, clients: Any) -> None:
    endpoint = stack.upstream
    endpoint.script(Say("before"), Fail(400))
    agent = AssistantAgent("solver", clients(base_url=endpoint.url))
    team = RoundRobinGroupChat([agent], max_turns=2)
    with pytest.raises(RuntimeError, match="400"), record() as recorded:
        await team.run(task="hello")
    assert recorded.episode().ending is Ending.CRASHED
    assert [t.response["content"] for t in recorded.transitions()] == ["before"]
    assert current_attempt() is None


async def test_in_a_rollout_the_gateway_records_and_nothing_is_kept(stack: Any, clients: Any, trial: Any) -> None:
    stack.upstream.script(CallTools([("add", {"a": 1, "b": 2})]))
    with trial.running(), record() as recorded:
        await AssistantAgent("solver", clients(), tools=[add]).run(task="hello")
    assert recorded.episode() is None
    assert recorded.transitions() == []
    assert await trial.agents() == ["solver"]
    assert [o.tool for o in trial.tool_results] == ["add"]
