"""What is particular to Haystack: who calls and what the tools did, in pipelines, agents and agents that are tools."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from haystack import Pipeline, tracing
from haystack.dataclasses import ChatMessage
from haystack.tools import ComponentTool, Tool
from haystack.tracing.tracer import NullTracer, Span, Tracer

from agl_core.capture import identify
from agl_core.testing.adapters.tools import ASK_WEATHER, WEATHER_STATUSES, weather, weather_statuses
from agl_core.testing.scripts import CallTools, Say, by_agent, in_turn


async def test_an_agent_that_stops_at_a_failure(world: Any, attempt: Any, agent: Any, run: Any) -> None:
    world.stack.upstream.script(CallTools([("weather", {"city": "Atlantis"}, "c1")]))
    with attempt.running(), pytest.raises(Exception, match="no such city"):
        await run("solver", agent("solver", [weather], raise_on_tool_invocation_failure=True))
    assert [(str(each.status), each.tool_call_id) for each in attempt.tool_results] == [("error", "c1")]


@pytest.mark.parametrize("raises", [False, True])
async def test_a_tool_that_does_not_exist(world: Any, attempt: Any, agent: Any, run: Any, raises: bool) -> None:
    world.stack.upstream.script(CallTools([("climate", {}, "c1")]), Say("Sorry."))
    made = agent("solver", [weather], raise_on_tool_invocation_failure=raises)
    with attempt.running():
        if raises:
            with pytest.raises(Exception, match="'climate' not found"):
                await run("solver", made)
        else:
            await run("solver", made)
    (result,) = attempt.tool_results
    assert (result.tool, str(result.status), result.tool_call_id) == ("climate", "error", "c1")
    assert "Tool 'climate' not found. Available tools: weather" in (result.error or result.result)


async def test_an_agent_as_a_tool(world: Any, attempt: Any, agent: Any, run: Any) -> None:
    world.stack.upstream.answer = by_agent(
        boss=in_turn(CallTools([("expert", {"messages": [_user("Warm?")]}, "c0")]), Say("Yes.")),
        researcher=in_turn(CallTools([("weather", {"city": "Bern"}, "c0")]), Say("22 °C")),
    )
    expert = ComponentTool(agent("researcher", [weather]), name="expert", description="Knows.")
    with attempt.running():
        await run("boss", agent("boss", [expert]))
    episode = await attempt.close()
    assert [each.agent for each in episode.transitions] == ["boss", "expert", "expert", "boss"]
    found = [[(each.tool, each.agent) for each in transition.tool_results] for transition in episode.transitions]
    assert found == [[("expert", "boss")], [("weather", "expert")], [], []]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"text": text}]}


async def test_calls_in_a_tool_are_of_the_agent_that_called_it(world: Any, attempt: Any, agent: Any, run: Any) -> None:
    def summary() -> str:
        """Sum up."""
        return str(world.generator().run([ChatMessage.from_system("tool")])["replies"][0].text)

    world.stack.upstream.answer = by_agent(
        boss=in_turn(CallTools([("summary", {}, "c0")]), Say("Done.")), tool=lambda _: Say("Short.")
    )
    with attempt.running():
        await run("boss", agent("boss", [summary]))
    assert await attempt.agents() == ["boss", "boss", "boss"]
    assert [each.result for each in attempt.tool_results] == ["Short."]


async def test_components_of_a_pipeline_are_known_by_their_names(world: Any, attempt: Any) -> None:
    pipeline = Pipeline()
    pipeline.add_component("writer", world.generator())
    pipeline.add_component("critic", world.generator())
    pipeline.connect("writer.replies", "critic.messages")
    world.stack.upstream.answer = lambda _: Say("Well.")
    with attempt.running():
        await asyncio.to_thread(pipeline.run, {"writer": {"messages": [ChatMessage.from_user("Write.")]}})
    assert await attempt.agents() == ["writer", "critic"]


async def test_an_agent_alone_has_the_name_that_is_given_around_it(world: Any, attempt: Any, agent: Any) -> None:
    world.stack.upstream.script(ASK_WEATHER, Say("Warm."))
    with attempt.running(), identify("solver"):
        await agent("solver", [weather]).run_async([ChatMessage.from_user("How warm is it?")])
    assert await attempt.agents() == ["solver", "solver"]
    assert {each.agent for each in attempt.tool_results} == {"solver"}


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


async def test_tools_by_class(world: Any, attempt: Any, agent: Any, run: Any) -> None:
    async def later(city: str) -> str:
        await asyncio.sleep(0)
        return weather(city)

    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = Tool(name="weather", description="Weather.", parameters=schema, function=weather, async_function=later)
    world.stack.upstream.script(ASK_WEATHER, Say("Warm."))
    with attempt.running():
        await run("solver", agent("solver", [tool]))
    assert weather_statuses(attempt.tool_results) == WEATHER_STATUSES
