"""Agents written from scratch: their calls and tools through the real gateway, with the real OpenAI client."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from running_servers import stack_in_thread
from testing_aids import tools_by_call

import agl_core
from agl_core.capture import AttemptContext, Recording, current_identity, running
from agl_core.capture.marking import AgentRun
from agl_core.errors import AgentError
from agl_core.testing.scripts import Hold
from agl_server.testing import Stack

pytestmark = pytest.mark.usefixtures("attached")

CITIES = {"Oslo": "4 °C", "Atlantis": ""}


@agl_core.tool
def look_up(city: str) -> str:
    if city == "Mordor":
        raise ConnectionError("one does not simply walk in")
    if city == "Limbo":
        raise subprocess.TimeoutExpired("curl", 5)
    return CITIES[city]


@agl_core.tool
async def look_up_async(city: str) -> str:
    await asyncio.sleep(0)
    return look_up.__wrapped__(city)


async def ask(client: openai.AsyncOpenAI, text: str) -> str:
    reply = await client.chat.completions.create(model="default", messages=[{"role": "user", "content": text}])
    return reply.choices[0].message.content or ""


async def test_concurrent_runs_of_one_agent_are_told_apart(stack: Stack) -> None:
    shared, attempt = agl_core.agent("twin"), await stack.attempt()
    client = stack.client(attempt.key)

    async def solve(city: str) -> None:
        async with shared:
            for turn in range(3):
                await ask(client, f"{city} {turn}")
                async with agl_core.tool(f"{city} {turn}") as run:
                    await asyncio.sleep(0.001 * len(city))
                    run.result = CITIES[city]

    with attempt.running():
        await asyncio.gather(*(solve(city) for city in CITIES for _ in range(3)))
    episode = await attempt.close()
    assert len(episode.transitions) == 18
    for transition in episode.transitions:
        [tool_result] = transition.tool_results
        assert tool_result.tool == transition.messages[-1]["content"]
        assert tool_result.status.value == ("ok" if "Oslo" in tool_result.tool else "empty")


def test_a_call_in_asyncio_run_after_a_synchronous_one() -> None:
    with stack_in_thread() as (stack, portal):
        attempt = portal.call(stack.attempt)
        base_url, key = stack.url(attempt.key), stack.key(attempt.key)

        async def later(*texts: str) -> None:
            async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:
                for text in texts:
                    await ask(client, text)

        with openai.OpenAI(base_url=base_url, api_key=key) as client, attempt.running(), agl_core.agent("mixed"):
            client.chat.completions.create(model="default", messages=[{"role": "user", "content": "first"}])
            look_up("Oslo")
            asyncio.run(later("second"))
            look_up("Atlantis")
            asyncio.run(later("third", "fourth"))
            asyncio.run(later("fifth"))
            for city in ("Mordor", "Limbo"):
                with contextlib.suppress(Exception):
                    look_up(city)
        episode = portal.call(attempt.close)
    assert [tools for _, *tools in tools_by_call(episode)] == [
        [("look_up", "ok")],
        [("look_up", "empty")],
        *([], []),
        [("look_up", "error"), ("look_up", "timeout")],
    ]
    assert episode.unjoined == ()
    first = episode.transitions[0].tool_results[0]
    assert (first.arguments, first.result, first.agent) == ({"city": "Oslo"}, "4 °C", "mixed")
    assert "walk in" in episode.transitions[4].tool_results[0].error


async def test_what_cannot_be_told_is_not_guessed(stack: Stack) -> None:
    attempt, holds = await stack.attempt(), (Hold(), Hold())
    client = stack.client(attempt.key)
    with attempt.running(), agl_core.agent("forked"):
        look_up("Oslo")  # before any call
        stack.upstream.script(*holds)
        both = asyncio.gather(ask(client, "a"), ask(client, "b"))
        await asyncio.gather(*(hold.arrived.wait() for hold in holds))
        for hold in holds:
            hold.release.set()
        await both
        look_up("Oslo")  # after two calls at once
    episode = await attempt.close()
    assert [tools for _, *tools in tools_by_call(episode)] == [[], []]
    assert len(episode.unjoined) == 2


async def test_tools_belong_to_the_agent_that_only_calls_if_the_code_around_runs_them(stack: Stack) -> None:
    attempt = await stack.attempt()
    client = stack.client(attempt.key)
    with attempt.running(), agl_core.agent("program"):
        for name in ("writer", "checker"):
            run = AgentRun(name, only_calls=True)
            run.start()
            await ask(client, name)
            run.end(None)
            look_up("Oslo")
        await ask(client, "so")
        look_up("Atlantis")
    episode = await attempt.close()
    assert tools_by_call(episode) == [
        ("writer", ("look_up", "ok")),
        ("checker", ("look_up", "ok")),
        ("program", ("look_up", "empty")),
    ]
    results = [result for transition in episode.transitions for result in transition.tool_results]
    assert [result.agent for result in results] == ["writer", "checker", "program"]


async def test_parallel_tools_and_a_tool_that_asks_the_model_itself(stack: Stack) -> None:
    attempt = await stack.attempt()
    client = stack.client(attempt.key)

    @agl_core.tool
    async def summarise(text: str) -> str:
        summary = await ask(client, f"sum up {text}")
        with agl_core.tool("inner") as run:
            run.result = summary
        return summary

    with attempt.running(), agl_core.agent("boss"):
        await ask(client, "first")
        await asyncio.gather(summarise("x"), summarise("y"), look_up_async("Oslo"))
        with ThreadPoolExecutor() as pool:
            assert pool.submit(look_up, "Oslo").result() == "4 °C"
        await ask(client, "second")
        with agl_core.agent("critic"):
            await ask(client, "critique")
            look_up("Atlantis")
        look_up("Atlantis")
        await ask(client, "last")
    episode = await attempt.close()
    by_prompt = {t.messages[-1]["content"]: t for t in episode.transitions}
    tools = {prompt: sorted(o.tool for o in t.tool_results) for prompt, t in by_prompt.items()}
    assert tools == {
        "first": ["look_up", "look_up_async", "summarise", "summarise"],
        "second": ["look_up"],
        "sum up x": ["inner"],
        "sum up y": ["inner"],
        "critique": ["look_up"],
        "last": [],
    }
    assert {prompt: t.agent for prompt, t in by_prompt.items()} == {
        **dict.fromkeys(tools, "boss"),
        "critique": "critic",
    }


def test_a_block_that_tells_no_result_is_no_empty_result_but_none_is() -> None:
    recording = Recording()
    with running(AttemptContext("r", 0, "http://127.0.0.1:9", "key", recording)):
        with agl_core.tool("silent"):
            pass
        with agl_core.tool("none") as run:
            run.result = None
        with pytest.raises(KeyError), agl_core.tool("broken"):
            raise KeyError("x")
    assert [(o.tool, o.status.value) for o in recording.tool_results] == [
        ("silent", "ok"),
        ("none", "empty"),
        ("broken", "error"),
    ]


def test_outside_a_rollout_marked_code_runs_as_it_is() -> None:
    assert look_up("Oslo") == "4 °C"
    assert asyncio.run(look_up_async("Oslo")) == "4 °C"
    with agl_core.tool("any") as run:
        run.result = 1
    agl_core.state(plan=1)
    assert look_up.__name__ == "look_up"
    assert current_identity() is None


def test_generators_are_refused_with_the_way_out() -> None:
    def stream() -> Iterator[str]:
        yield "a"

    for marker in (agl_core.agent("streamer"), agl_core.tool):
        with pytest.raises(AgentError, match=r"cannot mark stream, which is a generator: use `with agl_core"):
            marker(stream)
