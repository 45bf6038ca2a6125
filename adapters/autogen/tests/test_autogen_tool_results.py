"""What the tools did, those of workbenches too, joined with the calls that the gateway stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ToolCallExecutionEvent
from autogen_core import AgentId, MessageContext, RoutedAgent, SingleThreadedAgentRuntime, rpc
from autogen_core.models import UserMessage
from autogen_core.tool_agent import ToolAgent, tool_agent_caller_loop
from autogen_core.tools import (
    FunctionTool,
    StaticWorkbench,
    TextResultContent,
    ToolOverride,
    ToolResult,
    ToolSchema,
    Workbench,
)
from pydantic import BaseModel

import agl_autogen.agents
from agl_core.testing.scripts import CallTools, Say
from agl_core.types import ToolStatus


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def broken() -> str:
    """Fail."""
    raise ValueError("boom")


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
        said = await tool_agent_caller_loop(
            self,
            tool_agent_id=AgentId("toolbox", self.id.key),
            model_client=self._client,
            input_messages=[UserMessage(content=message.text, source="user")],
            tool_schema=self._tools,
        )
        return str(said[-1].content)


async def test_tools_that_another_agent_runs_are_the_tool_results_of_who_asked(world: Any, trial: Any) -> None:
    world.upstream.script(CallTools([("add", {"a": 1, "b": 2}), ("broken", {})]), Say("3"))
    tools = [FunctionTool(add, "Add."), FunctionTool(broken, "Fail.")]
    client, runtime = world.client(), SingleThreadedAgentRuntime()
    await ToolAgent.register(runtime, "toolbox", lambda: ToolAgent("runs tools", list(tools)))
    await Worker.register(runtime, "worker", lambda: Worker(client, tools))
    runtime.start()
    with trial.running():
        assert await runtime.send_message(Ask("1 + 2?"), AgentId("worker", "default")) == "3"
    await runtime.stop()
    assert await trial.agents() == ["worker", "worker"]
    tool_results = (await trial.close()).transitions[0].tool_results
    assert [(o.tool, str(o.status), o.agent) for o in tool_results] == [
        ("add", "ok", "worker"),
        ("broken", "error", "worker"),
    ]


class Answer(BaseModel):
    text: str


async def test_what_the_program_sees_is_the_same(world: Any, trial: Any) -> None:
    def found() -> Answer:
        """Find."""
        return Answer(text="it")

    client = world.client(default_headers={"Authorization": f"Bearer {world.stack.key(trial.key)}"})

    async def seen() -> list[Any]:
        world.upstream.script(CallTools([("found", {}), ("broken", {}), ("lost", {})]), Say("done"))
        agent = AssistantAgent("solver", client, tools=[found, broken], reflect_on_tool_use=True)
        told: list[Any] = []
        async for item in agent.run_stream(task="hello"):
            results = item.content if isinstance(item, ToolCallExecutionEvent) else ()
            told.append((type(item), [(result.name, result.content, result.is_error) for result in results]))
        return told

    unwatched = await seen()
    assert trial.tool_results == ()
    with trial.running():
        assert await seen() == unwatched
    assert len(trial.tool_results) == 2


@pytest.mark.expects_problems
async def test_an_adapter_that_fails_does_not_break_the_agent(
    world: Any, trial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(agl_autogen.agents, "tool_result_report", fail)
    monkeypatch.setattr("agl_autogen.agents.IdentityScope", fail)
    world.upstream.script(CallTools([("add", {"a": 1, "b": 2})]))
    with trial.running():
        result = await AssistantAgent("solver", world.client(), tools=[add]).run(task="hello")
    assert result.messages[-1].to_text() == "3"
    problems = " ".join(trial.active.recording.problems)
    assert "closed failed: KeyError" in problems
    assert "Watching AssistantAgent.on_messages failed: KeyError" in problems
    assert await trial.agents() == [None]


async def test_an_override_goes_by_the_name_that_the_model_knows(run: Any) -> None:
    tool = FunctionTool(add, "Add.")
    workbench = StaticWorkbench([tool], tool_overrides={"add": ToolOverride(name="plus")})
    (tool_result,) = await run(("plus", {"a": 1, "b": 2}), workbench=workbench)
    assert (tool_result.tool, tool_result.result) == ("plus", "3")


class Remote(Workbench):
    """A workbench whose tools are elsewhere, as those of an MCP server are."""

    def __init__(self, result: str | Exception, is_error: bool = False) -> None:
        self._result, self._is_error = result, is_error

    async def list_tools(self) -> list[ToolSchema]:
        return [ToolSchema(name="fetch", description="Fetch.")]

    async def call_tool(
        self, name: str, arguments: Any = None, cancellation_token: Any = None, call_id: str | None = None
    ) -> ToolResult:
        if isinstance(self._result, Exception):
            raise self._result
        return ToolResult(name=name, result=[TextResultContent(content=self._result)], is_error=self._is_error)

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def reset(self) -> None: ...
    async def save_state(self) -> Mapping[str, Any]:
        return {}

    async def load_state(self, state: Mapping[str, Any]) -> None: ...


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
