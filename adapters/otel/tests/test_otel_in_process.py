"""Agents in this process: the header says who calls, and spans say what the tools did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from testing_aids import run_python

from agl_otel import AglSpanProcessor

from .otlp_intake import agent_named


def tool(id: str | None = None, **more: Any) -> dict[str, Any]:
    named = {"gen_ai.tool.call.id": id} if id else {}
    return {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add", **named, **more}


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
