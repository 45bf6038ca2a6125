"""Agents that export spans: their calls are named, and their tools' results recorded."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openinference.instrumentation.openai import OpenAIInstrumentor as OpenInference
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.openai import OpenAIInstrumentor as OpenLLMetry
from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor as GenAI
from opentelemetry.trace import StatusCode, Tracer

from agl_core.testing.scripts import CallTools, Say
from agl_core.types import Episode, Source, ToolStatus
from agl_server.testing import Stack

from .otlp_intake import ADD, JSON, USER, agent_named, ask, exported, exporting, flush, post

GENAI_AGENT = agent_named("solver")
OPENINFERENCE_AGENT = {"openinference.span.kind": "AGENT", "agent.name": "solver"}
OPENLLMETRY_AGENT = {"traceloop.span.kind": "agent", "traceloop.entity.name": "solver"}

CALL = SimpleNamespace(id="c1", function=SimpleNamespace(arguments='{"a": 1}'))


def genai_tool(call: Any, result: str) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "add",
        "gen_ai.tool.call.id": call.id,
        "gen_ai.tool.call.arguments": call.function.arguments,
        "gen_ai.tool.call.result": result,
    }


def openinference_tool(call: Any, result: str) -> dict[str, Any]:
    return {
        "openinference.span.kind": "TOOL",
        "tool.name": "add",
        "tool_call.id": call.id,
        "input.value": call.function.arguments,
        "output.value": result,
    }


def langfuse_tool(call: Any, result: str) -> dict[str, Any]:
    """As `langfuse.observe(as_type="tool")` of Langfuse 5.0 writes it."""
    arguments = json.dumps({"args": [], "kwargs": json.loads(call.function.arguments)})
    return {
        "langfuse.observation.type": "tool",
        "langfuse.observation.input": arguments,
        "langfuse.observation.output": result,
    }


VOCABULARIES = {
    "openllmetry": (OpenLLMetry, OPENLLMETRY_AGENT, genai_tool),
    "genai": (GenAI, GENAI_AGENT, genai_tool),
    "openinference": (OpenInference, OPENINFERENCE_AGENT, openinference_tool),
    "langfuse": (GenAI, {"langfuse.observation.type": "agent"}, langfuse_tool),
}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
async def test_each_vocabulary_names_agents_and_tells_tool_results(
    vocabulary: str, intake: Stack, instrument: Any
) -> None:
    instrumentor, agent, tool = VOCABULARIES[vocabulary]
    attempt = await intake.attempt()
    intake.upstream.script(CallTools([("add", {"a": 1}), ("add", {"a": 2})]), Say("3"))
    with exporting(attempt) as provider:
        instrument(instrumentor, provider)
        tracer, client = provider.get_tracer("agent"), intake.client(attempt.key)
        with tracer.start_as_current_span("solver", attributes=agent):
            message = await ask(client, USER, tools=[ADD])
            first, second = message.tool_calls
            with tracer.start_as_current_span("add", attributes=tool(first, "3")):
                pass
            with pytest.raises(TimeoutError), tracer.start_as_current_span("add", attributes=tool(second, "")):
                raise TimeoutError("5 s")
            await ask(client, USER)
        await flush(provider)
    episode = await attempt.close()
    assert [t.agent for t in episode.transitions] == ["solver", "solver"]
    assert all(t.has_ids for t in episode.transitions)
    ok, late = episode.transitions[0].tool_results
    assert (ok.tool, ok.tool_call_id, ok.status, ok.result) == ("add", first.id, ToolStatus.OK, "3")
    assert (ok.arguments, ok.agent) == ({"a": 1}, "solver")
    assert (late.tool_call_id, late.status, late.error) == (second.id, ToolStatus.TIMEOUT, "TimeoutError: 5 s")
    assert episode.unjoined == ()


async def test_a_call_whose_span_is_inside_the_span_of_another_has_a_name(intake: Stack) -> None:
    attempt = await intake.attempt()
    client = intake.client(attempt.key)
    ids = [(await client.chat.completions.create(model="default", messages=[USER])).id for _ in range(2)]

    def nested(tracer: Any) -> None:
        with tracer.start_as_current_span("invoke_agent", attributes=GENAI_AGENT), contextlib.ExitStack() as open_spans:
            for id in ids:
                attributes = {"gen_ai.operation.name": "chat", "gen_ai.response.id": id}
                open_spans.enter_context(tracer.start_as_current_span("chat", attributes=attributes))

    await post(intake, exported(nested).SerializeToString(), key=attempt.key)
    assert [t.agent for t in (await attempt.close()).transitions] == ["solver", "solver"]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_instrumentations_at_once_are_one_call(stream: bool, intake: Stack, instrument: Any) -> None:
    attempt = await intake.attempt()
    with exporting(attempt) as provider:
        for instrumentor in (OpenLLMetry, OpenInference):
            instrument(instrumentor, provider)
        tracer, client = provider.get_tracer("agent"), intake.client(attempt.key)
        with tracer.start_as_current_span("solver", attributes=GENAI_AGENT) as span:
            reply = await client.chat.completions.create(model="default", messages=[USER], stream=stream)
            if stream:
                async for _ in reply:
                    pass
        await flush(provider)
    (call,) = await attempt.calls()
    assert call.agent == "solver"
    assert call.parent_span == f"{span.get_span_context().span_id:016x}"


async def test_agents_whose_spans_come_in_batches(intake: Stack, instrument: Any) -> None:
    """The agent's own span ends last: its name is known batches after the calls."""
    attempt = await intake.attempt()
    intake.upstream.script(CallTools([("add", {})]), Say("3"))
    with exporting(attempt) as provider:
        instrument(GenAI, provider)
        tracer, client = provider.get_tracer("agent"), intake.client(attempt.key)
        with tracer.start_as_current_span("invoke_agent solver", attributes=GENAI_AGENT):
            with tracer.start_as_current_span("step", attributes={"graph.node.id": "plan"}):
                message = await ask(client, USER, tools=[ADD])
            await flush(provider)
            assert [call.agent for call in await attempt.calls()] == ["plan"]
            with tracer.start_as_current_span("add", attributes=genai_tool(message.tool_calls[0], "[]")):
                pass
            await flush(provider)
            (before,) = await intake.store.tool_results([attempt.key])
        await flush(provider)
    (call,) = await attempt.calls()
    (tool_result,) = await intake.store.tool_results([attempt.key])
    assert (before.agent, before.status) == (None, ToolStatus.EMPTY)
    assert (call.agent, tool_result.agent, tool_result.id) == ("solver", "solver", before.id)


async def test_a_span_that_comes_again_changes_nothing(intake: Stack) -> None:
    """A process that the agent starts may have its key, and know the ids of its spans."""
    attempt = await intake.attempt()

    def run(result: str, failed: bool) -> Any:
        def make(tracer: Tracer) -> None:
            with tracer.start_as_current_span("add", attributes=genai_tool(CALL, result)) as span:
                span.set_status(StatusCode.ERROR if failed else StatusCode.OK)

        return exported(make)

    first, forged = run("3", failed=True), run("4", failed=False)
    (original,), (again,) = (request.resource_spans[0].scope_spans[0].spans for request in (first, forged))
    again.trace_id, again.span_id = original.trace_id, original.span_id
    await post(intake, first.SerializeToString(), key=attempt.key)
    before = await intake.store.tool_results([attempt.key])
    await post(intake, forged.SerializeToString(), key=attempt.key)
    await attempt.close()
    assert await intake.store.tool_results([attempt.key]) == before
    assert [(o.status, o.source, o.adapter) for o in before] == [(ToolStatus.ERROR, Source.SPAN, "otel")]


async def test_what_the_agents_own_process_told_by_header_stays(intake: Stack, instrument: Any) -> None:
    attempt = await intake.attempt()
    with exporting(attempt) as provider:
        instrument(OpenLLMetry, provider)
        headers = {"x-agl-agent": "told", "x-agl-parent-span": "its own"}
        with provider.get_tracer("agent").start_as_current_span("solver", attributes=GENAI_AGENT):
            await ask(intake.client(attempt.key), USER, extra_headers=headers)
        await flush(provider)
    (call,) = await attempt.calls()
    assert (call.agent, call.parent_span) == ("told", "its own")


async def test_spans_after_the_end_change_nothing(
    intake: Stack, instrument: Any, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = await intake.attempt()
    with exporting(attempt) as provider:
        instrument(OpenLLMetry, provider)
        tracer = provider.get_tracer("agent")
        with tracer.start_as_current_span("solver", attributes=GENAI_AGENT):
            await ask(intake.client(attempt.key), USER)
            with tracer.start_as_current_span("add", attributes=genai_tool(CALL, "3")):
                pass
        await attempt.close()
        await flush(provider)
    (call,) = await attempt.calls()
    assert call.agent is None
    assert await intake.store.tool_results([attempt.key]) == []
    assert caplog.text.count("flush before the agent returns") == 1


async def test_an_exporter_finds_the_server_by_environment_alone(
    intake: Stack, instrument: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = await intake.attempt()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", intake.url(attempt.key).removesuffix("/v1"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer%20{intake.key(attempt.key)}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    with exporting(attempt, OTLPSpanExporter()) as provider:
        instrument(OpenLLMetry, provider)
        with provider.get_tracer("agent").start_as_current_span("invoke_agent", attributes=GENAI_AGENT):
            await ask(intake.client(attempt.key))
        await flush(provider)
    assert await attempt.agents() == ["solver"]


RAN = (
    '{"blocks":[{"text":"%s"}],"tool_name":"weather","raw_input":{"args":[],"kwargs":{"city":"%s"}},'
    '"raw_output":"%s","is_error":false}'
)
"""LlamaIndex's span about a tool."""
RECORDED = Path(__file__).parent / "recorded"


async def replayed(name: str, intake: Stack) -> Episode:
    """The same calls through the gateway, which gives replies ids of its own, and the same export with these."""
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    export = json.dumps(recorded["export"])
    attempt = await intake.attempt()
    client = intake.client(attempt.key)
    for exchange in recorded["exchanges"]:
        reply = exchange["reply"]
        intake.upstream.script(Say(reply) if isinstance(reply, str) else CallTools([tuple(t) for t in reply]))
        completion = await client.chat.completions.create(model="default", messages=exchange["messages"])
        export = export.replace(json.dumps(exchange["id"]), json.dumps(completion.id))
    taken = await post(intake, export.encode(), JSON, attempt.key)
    assert taken.json().get("partialSuccess", {}) == {}
    return await attempt.close()


def seen(episode: Episode) -> list[tuple[Any, ...]]:
    """Each tool result: id of its tool call, tool, status, result or error, rule."""
    return [
        (result.tool_call_id, result.tool, str(result.status), result.error or result.result, result.status_rule)
        for transition in episode.transitions
        for result in transition.tool_results
    ]


async def test_vercels_ai_sdk(intake: Stack) -> None:
    """The functionId names the agent; the message of a tool that threw is only the text of its error."""
    episode = await replayed("vercel_ai", intake)
    agents = [transition.agent for transition in episode.transitions]
    assert agents == ["solver", "solver", "expert", "solver", "solver", "writer", "writer"]
    results = seen(episode)
    assert [result[:4] for result in results[:4]] == [
        ("c1", "weather", "ok", '{"city":"Bern","degrees":22}'),
        ("c2", "weather", "error", "Error: no such city"),
        ("c3", "weather", "empty", '""'),
        ("c4", "expert", "ok", '"sunny"'),
    ]
    assert [(id, status, rule) for id, _, status, _, rule in results[4:6]] == [
        ("c5", "error", "vercel"),
        ("c6", "error", "vercel"),
    ]
    assert results[6][:4] == ("d1", "weather", "error", "Error: no such city")
    assert episode.unjoined == ()
    solver = episode.transitions[0].tool_results
    assert [t.arguments for t in solver] == [{"city": "Bern"}, {"city": "Atlantis"}, {"city": "Nowhere"}]
    assert {t.agent for t in solver} == {"solver"}


async def test_strands(intake: Stack) -> None:
    """Its spans have results and arguments in events; of a status dictionary, the model gets the text alone."""
    episode = await replayed("strands", intake)
    assert [(id, tool, status, result) for id, tool, status, result, _ in seen(episode) if id != "c5"] == [
        ("c1", "weather", "ok", "22"),
        ("c2", "weather", "error", "ValueError: no such city"),
        ("c3", "weather", "empty", ""),
        ("c6", "missing", "error", "Exception: Unknown tool: missing"),
        ("c7", "status", "error", "no city"),
    ]
    assert [status for id, _, status, *_ in seen(episode) if id == "c5"] == ["error"]
    results = episode.transitions[0].tool_results
    assert [(result.adapter, result.arguments) for result in results[:2]] == [
        ("otel", {"city": "Bern"}),
        ("otel", {"city": "Atlantis"}),
    ]
    assert episode.unjoined == ()


async def test_google_adk(intake: Stack) -> None:
    """Its spans have no results by default: status and result are those of the conversation."""
    episode = await replayed("google_adk", intake)
    assert [(id, status, rule) for id, _, status, _, rule in seen(episode)] == [
        ("c1", "ok", "ok"),
        ("c3", "empty", "empty"),
        ("c5", "error", "reported-error"),
        ("c6", "error", "reported-error"),
        ("c7", "error", "status-field"),
    ]
    results = episode.transitions[0].tool_results
    assert results[0].result == '{"result": "22"}'
    assert [result.arguments for result in results[:2]] == [{"city": "Bern"}, {"city": "Nowhere"}]
    assert {result.agent for result in results} == {"solver"}
    assert episode.unjoined == ()


async def test_llama_index_with_openinference(intake: Stack) -> None:
    """Its tool spans have no ids, and the model gets the bare text of an exception: tool and arguments join them."""
    episode = await replayed("llama_index", intake)
    assert [result[:4] for result in seen(episode)] == [
        ("c1", "weather", "ok", RAN % ("22", "Bern", "22")),
        ("c2", "weather", "error", "ValueError: no such city"),
        ("c3", "weather", "empty", RAN % ("", "Nowhere", "")),
        ("c5", "weather", "error", "TypeError: weather() got an unexpected keyword argument 'town'"),
        # In LlamaIndex's own words, which agl-llama-index would bring here.
        ("c6", "missing", "ok", "Tool missing not found. Please select a tool that is available."),
        ("c7", "status", "error", "{'status': 'error', 'error_message': 'no city'}"),
    ]
    assert seen(episode)[4][4] == "ok"
    assert [result.adapter for result in episode.transitions[1].tool_results] == ["otel"]
    assert episode.unjoined == ()
