"""LangChain and the OpenAI Agents SDK speak the Responses API through the gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool, handoff
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from agl_core.learning import build_episode
from agl_core.testing import episodes as make
from agl_core.testing.scripts import CallTools, Say
from agl_core.testing.server import Stack
from agl_core.types import Attempt, AttemptKey, Ending, ToolStatus

BOTH = CallTools([("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})], text="I add.")


def own(message: Any) -> dict[str, Any]:
    """A recorded reply as a request repeats it."""
    said = {name: message[name] for name in ("role", "content", "tool_calls") if message[name] is not None}
    return {"content": None, **said}


async def echoes_are_exact(stack: Stack, key: AttemptKey, *, replies: int) -> list[Any]:
    """Every reply but the last stands in the last request as the upstream said it."""
    calls = await stack.calls(key)
    assert {call.api for call in calls} == {"responses"}
    assert len(calls) == replies
    echoed = [each for each in calls[-1].request["messages"] if each["role"] == "assistant"]
    assert echoed == [own(call.choices[0].message) for call in calls[:-1]]
    return calls


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"output_version": "v1"}, {"store": False}, {"use_previous_response_id": True}]
)
async def test_langchain(stack: Stack, streamed: bool, options: dict[str, Any]) -> None:
    key = await stack.lease()
    model = ChatOpenAI(
        model="default",
        base_url=stack.url(key),
        api_key=stack.key(key),
        max_retries=0,
        use_responses_api=True,
        http_async_client=openai.DefaultAsyncHttpxClient(),
        **options,
    ).bind_tools([add])

    async def ask(messages: list[Any]) -> Any:
        if not streamed:
            return await model.ainvoke(messages)
        chunks = [chunk async for chunk in model.astream(messages)]
        return sum(chunks[1:], start=chunks[0])

    stack.upstream.script(BOTH, CallTools([("add", {"a": 5, "b": 6})]), Say("done"))
    messages: list[Any] = [HumanMessage("go")]
    for _ in range(2):
        answer = await ask(messages)
        results = [ToolMessage(add.invoke(each["args"]), tool_call_id=each["id"]) for each in answer.tool_calls]
        messages += [answer, *results]
    assert (await ask(messages)).text == "done"
    calls = await echoes_are_exact(stack, key, replies=3)
    told = [each["content"] for each in calls[-1].request["messages"] if each["role"] == "tool"]
    assert told == ["3", "7", "11"]


async def test_langchain_parses_structured_output(stack: Stack) -> None:
    key = await stack.lease()
    model = ChatOpenAI(
        model="default", base_url=stack.url(key), api_key=stack.key(key), use_responses_api=True
    ).with_structured_output({"title": "N", "type": "object", "properties": {"n": {"type": "integer"}}})
    assert await asyncio.to_thread(model.invoke, "give 7") == {"n": 7}


@pytest.mark.parametrize("streamed", [False, True])
async def test_agents_with_tools_and_a_handoff(stack: Stack, streamed: bool) -> None:
    key = await stack.lease()
    model = OpenAIResponsesModel("default", stack.client(key))

    @function_tool(name_override="add")
    def adding(a: int, b: int) -> str:
        """Add two numbers."""
        if a == 3:
            raise ValueError("no threes")
        return str(a + b)

    closer = Agent(name="closer", instructions="Close.", model=model)
    solver = Agent(
        name="solver",
        instructions="Solve.",
        model=model,
        tools=[adding],
        handoffs=[handoff(closer)],
        model_settings=ModelSettings(parallel_tool_calls=True, max_tokens=200),
    )
    stack.upstream.script(BOTH, CallTools([("transfer_to_closer", {})]), Say("closed"), Say("again"))
    config = RunConfig(tracing_disabled=True)
    if streamed:
        result: Any = Runner.run_streamed(solver, "go", run_config=config)
        assert [event async for event in result.stream_events()]
    else:
        result = await Runner.run(solver, "go", run_config=config)
    assert result.final_output == "closed"
    more = [*result.to_input_list(), {"role": "user", "content": "more"}]
    assert (await Runner.run(closer, more, run_config=config)).final_output == "again"
    calls = await echoes_are_exact(stack, key, replies=4)
    assert [call.request["messages"][0]["content"] for call in calls] == ["Solve.", "Solve.", "Close.", "Close."]
    episode = build_episode(
        make.rollout(key.rollout), Attempt(key.rollout, key.attempt, "w", 0.0, ending=Ending.FINISHED), calls
    )
    first, second, *_ = episode.transitions
    assert [(each.tool, each.status) for each in first.tool_results] == [
        ("add", ToolStatus.OK),
        ("add", ToolStatus.ERROR),
    ]
    assert [each.tool for each in second.tool_results] == ["transfer_to_closer"]
    assert first.messages == ({"role": "system", "content": "Solve."}, {"role": "user", "content": "go"})


async def test_agents_continue_by_previous_response_id(stack: Stack) -> None:
    key = await stack.lease()
    agent = Agent(name="a", model=OpenAIResponsesModel("default", stack.client(key)), tools=[])
    config = RunConfig(tracing_disabled=True)
    first = await Runner.run(agent, "one", run_config=config)
    await Runner.run(agent, "two", run_config=config, previous_response_id=first.last_response_id)
    calls = await echoes_are_exact(stack, key, replies=2)
    assert [each["role"] for each in calls[1].request["messages"]] == ["user", "assistant", "user"]
