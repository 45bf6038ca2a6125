"""LlamaIndex's own: who calls and what the tools did, in agents, workflows and tools of the user's."""

from pathlib import Path
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.tools import FunctionTool
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
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from running_servers import leased_attempt, stack_fixture  # noqa: F401
from testing_aids import check_snippets, weather

from agl_core.client.agent import PLACEHOLDER_KEY
from agl_core.testing.scripts import CallTools, Say
from agl_llama_index import llama_index as adapter
from agl_server.testing import LeasedAttempt, Stack, no_problems  # noqa: F401

README = Path(__file__).parent.parent / "README.md"


a_stack = stack_fixture(adapter)


def llm_of(stack: Stack) -> OpenAILike:
    """A model client with the server's URL alone: which attempt calls, its headers must tell."""
    given: dict[str, Any] = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
    return OpenAILike(model="default", api_base=stack.url(), api_key=PLACEHOLDER_KEY, **given)


def agent_of(stack: Stack, name: str, tools: Any = (), **options: Any) -> FunctionAgent:
    about = {"name": name, "description": name, "system_prompt": name}
    return FunctionAgent(tools=list(tools), llm=llm_of(stack), **about, **options)


class Town(BaseModel):
    """A town."""

    name: str


async def test_structured_output_is_one_more_call_of_the_agent(stack: Stack, attempt: LeasedAttempt) -> None:
    stack.upstream.script(Say("It is Bern."), CallTools([("Town", {"name": "Bern"}, "c1")]))
    with attempt.running():
        answer = await agent_of(stack, "clerk", output_cls=Town).run("Which town?")
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


async def test_a_workflow_of_the_users_own_is_known_by_its_class(stack: Stack, attempt: LeasedAttempt) -> None:
    stack.upstream.answer = lambda _: Say("Bern")
    with attempt.running():
        await Guide(llm_of(stack), FunctionTool.from_defaults(weather)).run()
    episode = await attempt.close()
    assert [t.agent for t in episode.transitions] == ["Guide"]
    (result,) = episode.transitions[0].tool_results
    assert (result.tool, str(result.status), result.arguments) == ("weather", "ok", {"city": "Bern"})


async def test_a_tool_that_waits_for_a_person_has_one_result(stack: Stack, attempt: LeasedAttempt) -> None:
    async def delete(ctx: Context) -> str:
        """Delete everything."""
        reply = await ctx.wait_for_event(HumanResponseEvent, waiter_event=InputRequiredEvent(prefix="Sure?"))
        return f"said {reply.response}"

    stack.upstream.script(CallTools([("delete", {}, "c1")]), Say("Done."))
    with attempt.running():
        handler = agent_of(stack, "solver", [delete]).run("Delete it.")
        async for event in handler.stream_events():
            if isinstance(event, InputRequiredEvent):
                handler.ctx.send_event(HumanResponseEvent(response="no"))
        await handler
    assert [(t.result, t.tool_call_id) for t in attempt.tool_results] == [("said no", "c1")]


async def test_the_snippets(stack: Stack, attempt: LeasedAttempt) -> None:
    await check_snippets(stack, attempt, README, ["solver", "solver"])
