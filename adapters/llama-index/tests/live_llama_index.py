"""What is particular to LlamaIndex: who calls and what the tools did, in agents, workflows and tools of the user's."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ImageBlock
from llama_index.core.tools import BaseTool, FunctionTool, ToolMetadata, ToolOutput
from llama_index.core.workflow import (
    Context,
    Event,
    HumanResponseEvent,
    InputRequiredEvent,
    StartEvent,
    StopEvent,
    Workflow,
    step,
)
from pydantic import BaseModel
from testing_aids import blocks, run_snippets, weather
from workflows.errors import WorkflowCancelledByUser

from agl_core.testing.scripts import CallTools, Say, by_agent, in_turn

README = Path(__file__).parent.parent / "README.md"


async def test_a_tool_that_does_not_exist(world: Any, attempt: Any, agent: Any) -> None:
    world.stack.upstream.script(CallTools([("climate", {}, "c1")]), Say("Sorry."))
    with attempt.running():
        await agent("solver", [weather]).run("How warm is it?")
    (result,) = attempt.tool_results
    assert (result.tool, str(result.status), result.status_rule) == ("climate", "error", "reported-error")
    assert result.result == "Tool climate not found. Please select a tool that is available."
    assert (await attempt.close()).unjoined == ()


async def test_results_that_are_no_text(world: Any, attempt: Any, agent: Any) -> None:
    def look() -> Any:
        """Look."""
        return ImageBlock(image=b"png", image_mimetype="image/png")

    def find() -> list[str]:
        """Find."""
        return []

    world.stack.upstream.script(CallTools([("look", {}, "c1"), ("find", {}, "c2")]), Say("Done."))
    with attempt.running():
        await agent("solver", [look, find]).run("Look.")
    assert [(each.tool, str(each.status), each.result) for each in attempt.tool_results] == [
        ("look", "ok", "[image]"),
        ("find", "empty", ""),
    ]


async def test_an_agent_as_a_tool_and_what_comes_after_it(world: Any, attempt: Any, agent: Any) -> None:
    expert = agent("expert", [weather])

    async def consult(question: str) -> str:
        """Ask the expert."""
        answer = str(await expert.run(question))
        await world.llm().achat([ChatMessage("sum up", role="user")])
        return answer

    # Both use the same ids, as some endpoints do.
    world.stack.upstream.answer = lambda seen: (
        Say("Summed up.")
        if seen.said == "sum up"
        else by_agent(
            boss=in_turn(CallTools([("consult", {"question": "Warm?"}, "c0")]), Say("Yes.")),
            expert=in_turn(CallTools([("weather", {"city": "Bern"}, "c0")]), Say("22 °C")),
        )(seen)
    )
    with attempt.running():
        await agent("boss", [consult]).run("How warm is it?")
    episode = await attempt.close()
    assert [each.agent for each in episode.transitions] == ["boss", "expert", "expert", "boss", "boss"]
    found = [[(each.tool, each.agent) for each in transition.tool_results] for transition in episode.transitions]
    assert found == [[("consult", "boss")], [("weather", "expert")], [], [], []]


class Town(BaseModel):
    """A town."""

    name: str


async def test_structured_output_is_one_more_call_of_the_agent(world: Any, attempt: Any, agent: Any) -> None:
    world.stack.upstream.script(Say("It is Bern."), CallTools([("Town", {"name": "Bern"}, "c1")]))
    with attempt.running():
        answer = await agent("clerk", output_cls=Town).run("Which town?")
    assert answer.structured_response == {"name": "Bern"}
    assert await attempt.agents() == ["clerk", "clerk"]


class Found(Event):
    city: str


class Guide(Workflow):
    """A workflow of the user's own: it calls the model in one step and a tool in another."""

    def __init__(self, llm: Any, tool: Any) -> None:
        super().__init__(timeout=60)
        self._llm, self._tool = llm, tool

    @step
    async def ask(self, event: StartEvent) -> Found:
        return Found(city=str((await self._llm.acomplete("Which city?")).text))

    @step
    async def look(self, event: Found) -> StopEvent:
        return StopEvent(result=str(await self._tool.acall(city=event.city)))


class Plain(BaseTool):
    """A tool that is not asynchronous."""

    @property
    def metadata(self) -> ToolMetadata:
        return ToolMetadata(name="weather", description="Weather.")

    def __call__(self, input: Any) -> ToolOutput:
        return ToolOutput(tool_name="weather", content=weather(input), raw_input={"input": input}, raw_output=None)


async def test_a_workflow_of_the_users_own_is_known_by_its_class(world: Any, attempt: Any) -> None:
    world.stack.upstream.answer = lambda _: Say("Bern")
    with attempt.running():
        await Guide(world.llm(), FunctionTool.from_defaults(weather)).run()
    episode = await attempt.close()
    assert [each.agent for each in episode.transitions] == ["Guide"]
    (result,) = episode.transitions[0].tool_results
    assert (result.tool, str(result.status), result.arguments) == ("weather", "ok", {"city": "Bern"})


async def test_a_tool_without_async(world: Any, attempt: Any, agent: Any) -> None:
    world.stack.upstream.script(CallTools([("weather", {"input": "Atlantis"}, "c1")]), Say("Sorry."))
    with attempt.running():
        await agent("solver", [Plain()]).run("How warm is it?")
    (result,) = attempt.tool_results
    assert (str(result.status), result.error, result.tool_call_id) == ("error", "ValueError: no such city", "c1")


async def test_a_tool_that_waits_for_a_person_has_one_result(world: Any, attempt: Any, agent: Any) -> None:
    async def delete(ctx: Context) -> str:
        """Delete everything."""
        said = await ctx.wait_for_event(HumanResponseEvent, waiter_event=InputRequiredEvent(prefix="Sure?"))
        return f"said {said.response}"

    world.stack.upstream.script(CallTools([("delete", {}, "c1")]), Say("Done."))
    with attempt.running():
        handler = agent("solver", [delete]).run("Delete it.")
        async for event in handler.stream_events():
            if isinstance(event, InputRequiredEvent):
                handler.ctx.send_event(HumanResponseEvent(response="no"))
        await handler
    assert [(each.result, each.tool_call_id) for each in attempt.tool_results] == [("said no", "c1")]


async def test_a_cancelled_run_has_no_tool_result(world: Any, attempt: Any, agent: Any) -> None:
    started = asyncio.Event()

    async def hang() -> str:
        """Hang."""
        started.set()
        await asyncio.Event().wait()
        return "never"

    world.stack.upstream.script(CallTools([("hang", {}, "c1")]), Say("Done."))
    with attempt.running():
        handler = agent("solver", [hang]).run("Hang.")
        await started.wait()
        await handler.cancel_run()
        with pytest.raises(WorkflowCancelledByUser):
            await handler
    assert attempt.tool_results == ()


async def test_the_snippets(world: Any, attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_BASE", world.stack.url(attempt.key))
    monkeypatch.setenv("OPENAI_API_KEY", world.stack.key(attempt.key))
    world.stack.upstream.script(CallTools([("add", {"a": 1, "b": 2})]), Say("3"))
    assert len(blocks(README, "python")) == 2

    def run() -> None:
        with attempt.running():
            run_snippets(README)

    # The snippets start an event loop of their own.
    await asyncio.to_thread(run)
    assert await attempt.agents() == ["solver", "solver"]
    assert [(each.tool, str(each.status), each.result) for each in attempt.tool_results] == [("add", "ok", "3")]
