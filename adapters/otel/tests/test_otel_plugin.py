"""How the adapter is found and attached without code; the README's snippets run as they stand."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from testing_aids import blocks, run_snippets

from agl_core.testing.scripts import Say
from agl_core.testing.server import running_stack


def test_an_unmodified_agent_is_seen_after_agl_attaches() -> None:
    program = """
        import sys
        import agl_core
        from agl_core.capture import ActiveAttempt, Recording, running

        attachment = agl_core.attach()
        assert "opentelemetry" not in sys.modules

        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        trace.set_tracer_provider(TracerProvider())
        recording = Recording()
        with running(ActiveAttempt("r1", 0, "http://127.0.0.1:9", "key", recording)):
            attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add"}
            trace.get_tracer("agent").start_span("add", attributes=attributes).end()
        assert [tool_result.tool for tool_result in recording.tool_results] == ["add"]
        assert not attachment.failed
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_framework_that_brings_spans_needs_no_provider_and_the_users_own_is_the_only_one_later(
    tmp_path: Path,
) -> None:
    (tmp_path / "strands.py").write_text("from opentelemetry import trace\ntracer = trace.get_tracer('strands')\n")
    program = """
        import agl_core
        from agl_core.capture import ActiveAttempt, Recording, running

        attachment = agl_core.attach()

        import strands
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
        recording, exporter, mine = Recording(), InMemorySpanExporter(), TracerProvider()
        mine.add_span_processor(SimpleSpanProcessor(exporter))
        with running(ActiveAttempt("r1", 0, "http://127.0.0.1:9", "key", recording)):
            for tool in ("before", "after"):
                attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": tool}
                strands.tracer.start_span(tool, attributes=attributes).end()
                trace.set_tracer_provider(mine)
        assert [tool_result.tool for tool_result in recording.tool_results] == ["before", "after"]
        assert [span.name for span in exporter.get_finished_spans()] == ["after"]
        assert trace.get_tracer_provider() is mine
        assert not attachment.failed
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


README = Path(__file__).parent.parent / "README.md"


async def test_the_snippets(
    instrument: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(blocks(README, "python")) == 2
    async with running_stack() as stack:
        monkeypatch.setenv("OPENAI_BASE_URL", stack.url(key := await stack.lease()))
        monkeypatch.setenv("OPENAI_API_KEY", stack.key(key))
        stack.upstream.script(Say("look up 1 + 2"), Say("3"))
        try:
            names = await asyncio.to_thread(run_snippets, README)
        finally:
            OpenAIInstrumentor().uninstrument()
    assert names["answer"] == "3"
    assert capsys.readouterr().out in blocks(README)
