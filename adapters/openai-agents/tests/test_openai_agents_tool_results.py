"""What the tools did, as real agents ran them."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import agents
import pytest
from agents import Agent, function_tool
from agents.mcp import MCPServerStdio

from agl_core.capture import running
from agl_core.testing.scripts import CallTools, Say, by_agent, in_turn
from agl_core.types import ToolStatus

from .sample_agents import broken, solver


@function_tool(failure_error_function=None)
def fatal() -> str:
    """Fail, and the run with it."""
    raise ValueError("boom")


@function_tool(failure_error_function=lambda context, error: "Never mind.")
def soothing() -> str:
    """Fail, in words of the user's own."""
    raise ValueError("boom")


@function_tool
def out_of_time() -> str:
    """Time out by itself."""
    raise TimeoutError("10 s")


@function_tool(timeout=0.01)
async def slow() -> str:
    """Take too long."""
    await asyncio.sleep(60)
    return "late"


@pytest.fixture
def tool_results(run_briefly: Any, attached: None, server: Any, attempt: Any) -> Any:
    """Runs an agent whose model asks for the given tools, and gives the tool results."""

    def run(*calls: tuple[str, str, Any], tools: Any) -> list[Any]:
        server.answer = in_turn(CallTools([(name, arguments, id) for id, name, arguments in calls]), Say("done"))
        active = attempt()
        with running(active):
            run_briefly(solver(*tools), "hello")
        assert active.recording.problems == ()
        return list(active.recording.tool_results)

    return run


@pytest.mark.parametrize(
    ("tool", "status", "error"),
    [
        (broken, "error", "ValueError: boom"),
        (soothing, "error", "ValueError: boom"),
        (out_of_time, "timeout", "TimeoutError: 10 s"),
        (slow, "timeout", None),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_failure_that_became_a_text(tool: Any, status: str, error: str, tool_results: Any) -> None:
    (tool_result,) = tool_results(("c1", tool.name, {}), tools=[tool])
    assert (str(tool_result.status), tool_result.error, tool_result.tool_call_id) == (status, error, "c1")


def test_a_failure_that_ends_the_run(run_briefly: Any, attached: None, server: Any, attempt: Any) -> None:
    server.answer = lambda seen: CallTools([("fatal", {}, "c1")])
    active = attempt()
    with running(active), pytest.raises(agents.AgentsException):
        run_briefly(solver(fatal), "hello")
    (tool_result,) = active.recording.tool_results
    assert (tool_result.error, tool_result.tool_call_id) == ("ValueError: boom", "c1")


def test_a_tool_that_calls_a_failing_tool_by_itself_has_not_failed(tool_results: Any) -> None:
    @function_tool
    async def careful(context: agents.RunContextWrapper[Any]) -> str:
        """Try, and do without."""
        return f"did without: {await broken.on_invoke_tool(context, '{}')}"  # type: ignore[arg-type]

    (tool_result,) = tool_results(("c1", "careful", {}), tools=[careful])
    assert (tool_result.tool, tool_result.status) == ("careful", ToolStatus.OK)


def test_an_agent_used_as_a_tool_that_waits_for_approval_has_no_tool_result_yet(
    attached: None, server: Any, attempt: Any, loop: Any
) -> None:
    @function_tool(needs_approval=True)
    def launch() -> str:
        """Launch."""
        return "launched"

    expert = Agent(name="expert", instructions="expert", model="m", tools=[launch])
    boss = Agent(name="boss", instructions="boss", model="m", tools=[expert.as_tool("consult", "Ask the expert.")])
    server.answer = by_agent(
        boss=in_turn(CallTools([("consult", {"input": "why"}, "c1")]), Say("done")),
        expert=in_turn(CallTools([("launch", {}, "e1")]), Say("up")),
    )
    active = attempt()

    async def ask_and_approve() -> Any:
        result = await agents.Runner.run(boss, "hello")
        (interruption,) = result.interruptions
        assert active.recording.tool_results == ()
        state = result.to_state()
        state.approve(interruption)
        return await agents.Runner.run(boss, state)

    with running(active):
        assert loop.run_until_complete(ask_and_approve()).final_output == "done"
    assert [(o.tool_call_id, o.result) for o in active.recording.tool_results] == [("e1", "launched"), ("c1", "up")]


MCP_SERVER = """
try:
    from mcp.server.fastmcp import FastMCP
except ImportError:  # mcp 2
    from mcp.server.mcpserver import MCPServer as FastMCP

server = FastMCP("test")

@server.tool()
def double(number: int) -> int:
    return 2 * number

@server.tool()
def refuse() -> str:
    raise ValueError("refused")

server.run()
"""


def test_tools_of_an_mcp_server(attached: None, server: Any, attempt: Any, loop: Any) -> None:
    server.answer = in_turn(CallTools([("double", {"number": 4}, "c1"), ("refuse", {}, "c2")]), Say("done"))
    active = attempt()

    async def serve_and_run() -> None:
        parameters: Any = {"command": sys.executable, "args": ["-c", MCP_SERVER]}
        async with MCPServerStdio(parameters, client_session_timeout_seconds=60) as mcp_server:
            await agents.Runner.run(solver(mcp_servers=[mcp_server]), "hello")

    with running(active):
        loop.run_until_complete(serve_and_run())
    tool_results = {o.tool_call_id: o for o in active.recording.tool_results}
    assert {id: str(o.status) for id, o in tool_results.items()} == {"c1": "ok", "c2": "error"}
    assert tool_results["c1"].result == {"type": "text", "text": "8"}
    assert tool_results["c2"].result["text"].startswith("Error executing tool refuse")
