"""Agents in this process: what their spans say, in the words of each instrumentation; and episodes without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openinference.instrumentation.openai import OpenAIInstrumentor as OpenInference
from opentelemetry.instrumentation.openai import OpenAIInstrumentor as OpenLLMetry
from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor as GenAI
from opentelemetry.sdk.trace import TracerProvider
from testing_aids import run_python

from agl_core.testing.scripts import CallTools, Say
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import Ending, FinishReason, ToolResult, ToolStatus
from agl_otel import AglSpanProcessor
from agl_otel.spans import Span, SpanTree, see

from .otlp_intake import ADD, USER, agent_named


def tool_span(id: str | None = None, **more: Any) -> dict[str, Any]:
    named = {"gen_ai.tool.call.id": id} if id else {}
    return {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add", **named, **more}


async def test_one_run_of_a_tool_seen_twice_is_one_tool_result(
    attached: None, intake: Any, provider: TracerProvider
) -> None:
    provider.add_span_processor(AglSpanProcessor())  # beside the attached one
    tracer, attempt = provider.get_tracer("agent"), await intake.attempt()
    with attempt.running():
        with tracer.start_as_current_span("add", attributes=tool_span("c1")) as outer:
            inner = tracer.start_span("add", attributes={"openinference.span.kind": "TOOL", "tool.name": "add"})
            inner.set_attribute("output.value", "3")
            inner.end()
            assert attempt.tool_results == ()
        with tracer.start_as_current_span("add", attributes=tool_span("c2")):
            with tracer.start_as_current_span("invoke_agent", attributes=agent_named("adder")):
                tracer.start_span("add", attributes=tool_span()).end()
            tracer.start_span("add", attributes=tool_span("c3")).end()
    results = attempt.tool_results
    assert [(o.tool_call_id, o.result) for o in results] == [("c1", "3"), (None, None), ("c3", None), ("c2", None)]
    assert results[0].span == f"{outer.get_span_context().span_id:016x}"


def test_a_framework_that_brings_spans_needs_no_provider_and_the_users_own_is_the_only_one_later(
    tmp_path: Path,
) -> None:
    (tmp_path / "strands.py").write_text("from opentelemetry import trace\ntracer = trace.get_tracer('strands')\n")
    program = """
        import agl_core
        from agl_core.capture import AttemptContext, Recording, running

        attachment = agl_core.attach()

        import strands
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
        recording, exporter, mine = Recording(), InMemorySpanExporter(), TracerProvider()
        mine.add_span_processor(SimpleSpanProcessor(exporter))
        with running(AttemptContext("r1", 0, "http://127.0.0.1:9", "key", recording)):
            for tool in ("before", "after"):
                attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": tool}
                strands.tracer.start_span(tool, attributes=attributes).end()
                trace.set_tracer_provider(mine)
        assert [tool_result.tool for tool_result in recording.tool_results] == ["before", "after"]
        assert [span.name for span in exporter.get_finished_spans()] == ["after"]
        assert trace.get_tracer_provider() is mine
        assert not attachment.failed
    """
    run_python(program, cwd=tmp_path)


SOLVER = agent_named("solver")
RAN = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add", "gen_ai.tool.call.result": "3"}
SAMPLING = {"temperature": 0.5, "max_tokens": 200, "seed": 3}


@pytest.fixture
async def upstream() -> AsyncIterator[ScriptedUpstream]:
    async with ScriptedUpstream() as running:
        yield running


@pytest.fixture
def client(upstream: ScriptedUpstream) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=upstream.url, api_key="key", max_retries=0)


@pytest.fixture
def processor(provider: TracerProvider) -> AglSpanProcessor:
    added = AglSpanProcessor()
    provider.add_span_processor(added)
    return added


async def solve(provider: TracerProvider, client: Any, upstream: ScriptedUpstream, **options: Any) -> None:
    """An agent that asks for one tool, and answers."""
    upstream.script(CallTools([("add", {"a": 1, "b": 2})]), Say("3"))
    tracer, messages = provider.get_tracer("agent"), [USER]
    create = client.chat.completions.create
    with tracer.start_as_current_span("invoke_agent solver", attributes=SOLVER):
        reply = await create(model="m", messages=messages, tools=[ADD], **SAMPLING, **options)
        (call,) = reply.choices[0].message.tool_calls
        with tracer.start_as_current_span("execute_tool add", attributes={**RAN, "gen_ai.tool.call.id": call.id}):
            pass
        asks = {"id": call.id, "type": "function", "function": {"name": "add", "arguments": call.function.arguments}}
        messages += [{"role": "assistant", "content": None, "tool_calls": [asks]}]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "3"}]
        await create(model="m", messages=messages, **SAMPLING, **options)


@pytest.mark.parametrize("kinds", [[], [OpenLLMetry], [GenAI], [OpenInference], [GenAI, OpenInference]])
async def test_an_agent_with_a_tool(
    kinds: list[Any],
    processor: AglSpanProcessor,
    provider: TracerProvider,
    instrument: Any,
    client: Any,
    upstream: ScriptedUpstream,
) -> None:
    for kind in kinds:
        instrument(kind, provider)
    await solve(provider, client, upstream)
    (episode,) = processor.episodes()
    assert (episode.ending, episode.unjoined) == (Ending.FINISHED, ())
    first, second = episode.transitions
    assert [(t.agent, t.turn, t.agent_turn) for t in (first, second)] == [("solver", 0, 0), ("solver", 1, 1)]
    (tool_call,) = first.response["tool_calls"]
    assert (tool_call["function"]["name"], json.loads(tool_call["function"]["arguments"])) == ("add", {"a": 1, "b": 2})
    assert [(o.tool, o.result, o.status) for o in first.tool_results] == [("add", "3", ToolStatus.OK)]
    assert (second.response["content"], second.finish_reason) == ("3", FinishReason.STOP)


async def test_each_root_is_an_episode_and_only_the_latest_are_kept(
    provider: TracerProvider, instrument: Any, client: Any
) -> None:
    kept = AglSpanProcessor(keep=2)
    provider.add_span_processor(kept)
    instrument(OpenLLMetry, provider)
    tracer = provider.get_tracer("agent")

    async def one(question: str) -> None:
        with tracer.start_as_current_span("run", attributes={"input.value": f'"{question}"'}):
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": question}], **SAMPLING
            )

    for question in ("a", "b", "c"):
        await one(question)
    tracer.start_span("no call in it").end()
    assert [e.task.input for e in kept.episodes()] == ["b", "c"]
    await asyncio.gather(one("d"), one("e"))
    assert all(len(e.transitions) == 1 for e in kept.episodes())
    assert {e.task.input for e in kept.episodes()} == {"d", "e"}
    kept.clear()
    assert kept.episodes() == []


AGENT, TOOL = {"openinference.span.kind": "AGENT"}, {"openinference.span.kind": "TOOL"}
INVOKE_AGENT = {"gen_ai.operation.name": "invoke_agent"}


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
        # AG2: its word for an agent without a name
        ("invoke_agent unknown", INVOKE_AGENT, None),
        ("invoke_agent unknown", agent_named("unknown"), None),
        ("invoke_agent x", agent_named("the unknown"), "the unknown"),
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
    "value", [{"a": 1}, {"kwargs": {"a": 1}}, {"args": [], "sanitize_inputs_outputs": True, "kwargs": {"a": 1}}]
)
def test_the_arguments_of_a_tools_function(value: Any) -> None:
    assert tool("add", {**TOOL, "input.value": json.dumps(value)}).arguments == {"a": 1}


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


def test_what_a_span_changes_does_not_grow_with_the_spans_before_it() -> None:
    tree = SpanTree()
    tools = [replace(span("execute_tool add", TOOL), id=f"{number:016x}", parent=f"{99:016x}") for number in range(50)]
    assert [len(tree.add([see(tool)])) for tool in tools] == [1] * 50
    around = tree.add([see(replace(span("invoke_agent solver", AGENT), id=f"{99:016x}"))])
    assert {result.agent for result in tree.tool_results(around)} == {"solver"}
    assert len(tree.tool_results(around)) == 50
