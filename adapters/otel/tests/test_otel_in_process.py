"""Agents in this process: the header says who calls, and spans say what the tools did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openinference.instrumentation.openai import OpenAIInstrumentor as OpenInference
from opentelemetry.instrumentation.openai import OpenAIInstrumentor as OpenLLMetry
from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor as GenAI
from opentelemetry.sdk.trace import TracerProvider
from testing_aids import run_python

from agl_core.testing.scripts import CallTools, Say
from agl_otel import AglSpanProcessor

from .otlp_intake import ADD, agent_named, ask


def tool(id: str | None = None, **more: Any) -> dict[str, Any]:
    named = {"gen_ai.tool.call.id": id} if id else {}
    return {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add", **named, **more}


@pytest.mark.parametrize("kinds", [[], [GenAI], [OpenLLMetry, OpenInference]])
async def test_agents_and_tool_results(
    kinds: list[Any], attached: None, stack: Any, instrument: Any, provider: TracerProvider
) -> None:
    for kind in kinds:
        instrument(kind, provider)
    tracer, attempt = provider.get_tracer("agent"), await stack.attempt()
    client = stack.client()  # one made once, whose base URL does not tell the rollout
    stack.upstream.script(CallTools([("add", {}), ("add", {}), ("add", {})]), Say("3"))
    with attempt.running(), tracer.start_as_current_span("invoke_agent", attributes=agent_named("Übersetzer")) as span:
        message = await ask(client, tools=[ADD])
        ok, empty, broken = (call.id for call in message.tool_calls)
        with tracer.start_as_current_span(
            "add", attributes=tool(ok, **{"gen_ai.tool.call.arguments": '{"a": 1}'})
        ) as s:
            s.set_attribute("gen_ai.tool.call.result", "3")
        with tracer.start_as_current_span("add", attributes=tool(empty, **{"gen_ai.tool.call.result": "null"})):
            pass
        with pytest.raises(ValueError, match="boom"), tracer.start_as_current_span("add", attributes=tool(broken)):
            raise ValueError("boom")
        await ask(client)
    episode = await attempt.close()

    assert [(t.agent, t.parent_span) for t in episode.transitions] == [
        ("Übersetzer", f"{span.get_span_context().span_id:016x}")
    ] * 2
    tool_results = episode.transitions[0].tool_results
    assert [(o.tool_call_id, str(o.status), o.result, o.error, o.agent) for o in tool_results] == [
        (ok, "ok", "3", None, "Übersetzer"),
        (empty, "empty", "null", None, "Übersetzer"),
        (broken, "error", None, "ValueError: boom", "Übersetzer"),
    ]
    assert tool_results[0].arguments == {"a": 1}
    assert {o.adapter for o in tool_results} == {"otel"}, "a framework's own adapter goes before it"
    assert episode.unjoined == ()


async def test_one_run_of_a_tool_seen_twice_is_one_tool_result(
    attached: None, stack: Any, provider: TracerProvider
) -> None:
    provider.add_span_processor(AglSpanProcessor())  # beside the attached one
    tracer, attempt = provider.get_tracer("agent"), await stack.attempt()
    with attempt.running():
        with tracer.start_as_current_span("add", attributes=tool("c1")) as outer:
            inner = tracer.start_span("add", attributes={"openinference.span.kind": "TOOL", "tool.name": "add"})
            inner.set_attribute("output.value", "3")
            inner.end()
            assert attempt.tool_results == ()
        with tracer.start_as_current_span("add", attributes=tool("c2")):
            with tracer.start_as_current_span("invoke_agent", attributes=agent_named("adder")):
                tracer.start_span("add", attributes=tool()).end()
            tracer.start_span("add", attributes=tool("c3")).end()
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
