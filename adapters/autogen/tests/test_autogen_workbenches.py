"""Tools of workbenches: overridden, of MCP servers, of the user's own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
from autogen_core.tools import (
    FunctionTool,
    StaticWorkbench,
    TextResultContent,
    ToolOverride,
    ToolResult,
    ToolSchema,
    Workbench,
)
from autogen_ext.tools.mcp import McpWorkbench, StdioServerParams

from agl_core.types import ToolStatus


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


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


MCP_SERVER = """
from mcp.server.fastmcp import FastMCP

server = FastMCP("test")

@server.tool()
def double(number: int) -> int:
    return 2 * number

@server.tool()
def refuse() -> str:
    raise ValueError("refused")

server.run()
"""


async def test_the_tools_of_an_mcp_server(run: Any) -> None:
    parameters = StdioServerParams(command=sys.executable, args=["-c", MCP_SERVER], read_timeout_seconds=60)
    async with McpWorkbench(parameters) as workbench:
        told = await run(("double", {"number": 21}), ("refuse", {}), workbench=workbench)
    doubled, refused = sorted(told, key=lambda tool_result: tool_result.tool)
    assert (doubled.tool, doubled.status, doubled.result) == ("double", ToolStatus.OK, "42")
    assert (refused.tool, refused.status) == ("refuse", ToolStatus.ERROR)
    assert "refused" in refused.result


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
