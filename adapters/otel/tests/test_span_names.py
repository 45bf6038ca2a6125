"""Names of agents and tools in spans, in the words of the instrumentations that make them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agl_core.types import ToolResult
from agl_otel.spans import Span, SpanTree, see

AGENT, TOOL = {"openinference.span.kind": "AGENT"}, {"openinference.span.kind": "TOOL"}


def span(name: str, attributes: dict[str, Any], **more: Any) -> Span:
    return Span("7" * 32, "7" * 16, None, name, attributes, **more)


@pytest.mark.parametrize(
    ("name", "attributes", "agent"),
    [
        # CrewAI: the role, with the task in the name of the span
        ("solver._execute_core", {**AGENT, "graph.node.id": "solver"}, "solver"),
        ("solver.find it._execute_core", {**AGENT, "graph.node.id": "solver "}, "solver"),
        ("solver.kickoff", AGENT, "solver"),
        # Agno: the id is random
        ("solver.arun", {**AGENT, "graph.node.id": "7f3a", "graph.node.name": "solver"}, "solver"),
        # smolagents
        ("solver.run", AGENT, "solver"),
        ("ToolCallingAgent.run", AGENT, "ToolCallingAgent"),
        # DSPy
        ("ReAct.forward", AGENT, "ReAct"),
        ("solver.__call__", AGENT, "solver"),
        # A name with a dot is no method
        ("example.org", AGENT, "example.org"),
        ("v1.2 solver", AGENT, "v1.2 solver"),
        ("solver.run", {**AGENT, "agent.name": "solver.run"}, "solver.run"),
        # Vercel: its operation is no name
        ("ai.generateText", {"ai.operationId": "ai.generateText", "ai.telemetry.functionId": "solver"}, "solver"),
        ("ai.generateText", {"ai.operationId": "ai.generateText"}, None),
    ],
)
def test_the_name_of_an_agent(name: str, attributes: dict[str, Any], agent: str | None) -> None:
    seen = see(span(name, attributes))
    assert (seen.is_agent, seen.agent) == (True, agent)


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("add.__call__", TOOL),
        ("add.acall", TOOL),
        ("add.run", {**TOOL, "tool.name": "add"}),
        ("SimpleTool", {**TOOL, "tool.name": "add.__call__"}),
        ("ai.toolCall", {"ai.operationId": "ai.toolCall", "ai.toolCall.name": "add"}),
        ("execute_tool add", {"gen_ai.operation.name": "execute_tool"}),
    ],
)
def test_the_name_of_a_tool(name: str, attributes: dict[str, Any]) -> None:
    assert tool(name, attributes).tool == "add"


def tool(name: str, attributes: dict[str, Any], **more: Any) -> ToolResult:
    did = see(span(name, attributes, **more)).did
    assert isinstance(did, ToolResult)
    return did


@pytest.mark.parametrize(
    "value",
    [
        '{"a": 1}',
        '{"kwargs": {"a": 1}}',
        '{"args": [], "sanitize_inputs_outputs": true, "kwargs": {"a": 1}}',
    ],
)
def test_the_arguments_of_a_tools_function(value: str) -> None:
    assert tool("add", {**TOOL, "input.value": value}).arguments == {"a": 1}


@pytest.mark.parametrize(("message", "status"), [("no such city", "error"), ("Timed out after 5 seconds.", "timeout")])
def test_a_failure_of_pydantic_ai_is_known_by_its_message(message: str, status: str) -> None:
    raised = {"exception.type": "pydantic_ai.exceptions.ToolRetryError", "exception.message": message}
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.call.result": message}
    seen = tool("execute_tool slow", attributes, failed=True, events={"exception": raised})
    assert (str(seen.status), seen.error) == (status, f"ToolRetryError: {message}")


def test_what_google_adk_leaves_out_is_no_empty_result() -> None:
    """With content in spans, and without."""
    base = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.call.id": "<not specified>"}
    for response in ("{}", '{"result": "<not specified>"}', None):
        more = {} if response is None else {"gcp.vertex.agent.tool_response": response}
        seen = tool("execute_tool add", {**base, "gcp.vertex.agent.tool_call_args": "{}", **more})
        assert (seen.status_rule, seen.tool_call_id, seen.arguments) == ("unknown", None, None)
    seen = tool("execute_tool add", {**base, "gcp.vertex.agent.tool_response": '{"result": ""}'})
    assert str(seen.status) == "empty"
    assert see(span("execute_tool (merged)", {**base, "gen_ai.tool.name": "(merged tools)"})).did is None


def test_the_word_of_ag2_for_an_agent_without_a_name_is_no_name() -> None:
    attributes = {"gen_ai.operation.name": "invoke_agent"}
    assert see(span("invoke_agent unknown", {**attributes, "gen_ai.agent.name": "unknown"})).agent is None
    assert see(span("invoke_agent unknown", attributes)).agent is None
    assert see(span("invoke_agent x", {**attributes, "gen_ai.agent.name": "the unknown"})).agent == "the unknown"


def test_what_a_span_changes_does_not_grow_with_the_spans_before_it() -> None:
    tree = SpanTree()
    tools = [replace(span("execute_tool add", TOOL), id=f"{number:016x}", parent=f"{99:016x}") for number in range(50)]
    assert [len(tree.add([see(tool)])) for tool in tools] == [1] * 50
    around = tree.add([see(replace(span("invoke_agent solver", AGENT), id=f"{99:016x}"))])
    assert {result.agent for result in tree.tool_results(around)} == {"solver"}
    assert len(tree.tool_results(around)) == 50
