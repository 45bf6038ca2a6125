"""What is particular to Haystack: its pipelines and its tracing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from haystack import Pipeline, tracing
from haystack.dataclasses import ChatMessage
from haystack.tracing.tracer import NullTracer, Span, Tracer
from testing_aids import blocks, run_snippets, weather

from agl_core.testing.scripts import CallTools, Say

README = Path(__file__).parent.parent / "README.md"


async def test_a_tool_that_does_not_exist(world: Any, attempt: Any, agent: Any, run: Any) -> None:
    world.stack.upstream.script(CallTools([("climate", {}, "c1")]), Say("Sorry."))
    with attempt.running():
        await run("solver", agent("solver", [weather]))
    (result,) = (await attempt.close()).transitions[0].tool_results
    assert (result.tool, str(result.status), result.tool_call_id) == ("climate", "error", "c1")
    assert "Tool 'climate' not found. Available tools: weather" in result.error


async def test_components_of_a_pipeline_are_known_by_their_names(world: Any, attempt: Any) -> None:
    pipeline = Pipeline()
    pipeline.add_component("writer", world.generator())
    pipeline.add_component("critic", world.generator())
    pipeline.connect("writer.replies", "critic.messages")
    world.stack.upstream.answer = lambda _: Say("Well.")
    with attempt.running():
        await asyncio.to_thread(pipeline.run, {"writer": {"messages": [ChatMessage.from_user("Write.")]}})
    assert await attempt.agents() == ["writer", "critic"]


async def test_a_tracer_of_the_users_own_stays(world: Any, attempt: Any, agent: Any, run: Any) -> None:
    class Noting(NullTracer):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def trace(self, operation_name: str, tags: Any = None, parent_span: Span | None = None) -> Any:
            self.seen.append(operation_name)
            return super().trace(operation_name, tags, parent_span)

    noting: Tracer = Noting()
    world.stack.upstream.script(Say("Warm."))
    tracing.enable_tracing(noting)
    try:
        with attempt.running():
            await run("solver", agent("solver", [weather]))
    finally:
        tracing.disable_tracing()
    assert {"haystack.pipeline.run", "haystack.component.run", "haystack.agent.run"} <= set(noting.seen)
    assert await attempt.agents() == ["solver"]


async def test_the_snippets(world: Any, attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", world.stack.url(attempt.key))
    monkeypatch.setenv("OPENAI_API_KEY", world.stack.key(attempt.key))
    world.stack.upstream.script(CallTools([("add", {"a": 1, "b": 2})]), Say("3"))
    assert len(blocks(README, "python")) == 2

    def run() -> None:
        with attempt.running():
            run_snippets(README)

    # The snippets start an event loop of their own.
    await asyncio.to_thread(run)
    assert await attempt.agents() == ["solver", "solver"]
    (result,) = (await attempt.close()).transitions[0].tool_results
    assert (result.tool, str(result.status), result.result) == ("add", "ok", "3")
