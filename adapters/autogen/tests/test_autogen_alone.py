"""Recording used alone: no server of agl's, any endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import (
    UserMessage,
)
from autogen_ext.models.cache import ChatCompletionCache
from autogen_ext.models.replay import ReplayChatCompletionClient

from agl_autogen import record
from agl_core.capture import current_attempt
from agl_core.testing.scripts import CallTools, Fail, Say
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import Ending

SETTINGS = {"temperature": 0.5, "max_tokens": 200, "seed": 7}


@pytest.fixture
async def endpoint() -> AsyncIterator[ScriptedUpstream]:
    async with ScriptedUpstream() as upstream:
        yield upstream


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def test_a_block_is_an_episode(endpoint: Any, model_client: Any) -> None:
    endpoint.script(CallTools([("add", {"a": 1, "b": 2})]), Say("3"))
    agent = AssistantAgent("solver", model_client(endpoint.url, **SETTINGS), tools=[add], reflect_on_tool_use=True)
    with record("1 + 2?") as recorded:
        recorded.result = (await agent.run(task="1 + 2?")).messages[-1].to_text()
        assert recorded.episode() is None

    episode = recorded.episode()
    assert episode is not None
    assert (episode.ending, episode.task.input, episode.result) == (Ending.FINISHED, "1 + 2?", "3")
    first, second = recorded.transitions()
    assert [(t.agent, t.has_ids) for t in (first, second)] == [("solver", True)] * 2
    assert [(o.tool, o.result, str(o.status)) for o in first.tool_results] == [("add", "3", "ok")]


async def test_an_agent_that_crashes(endpoint: Any, model_client: Any) -> None:
    endpoint.script(Say("before"), Fail(400))
    agent = AssistantAgent("solver", model_client(endpoint.url, **SETTINGS))
    team = RoundRobinGroupChat([agent], max_turns=2)
    with pytest.raises(RuntimeError, match="400"), record() as recorded:
        await team.run(task="hello")
    assert recorded.episode().ending is Ending.CRASHED
    assert [t.response["content"] for t in recorded.transitions()] == ["before"]
    assert current_attempt() is None


async def test_a_cached_reply_is_no_call(endpoint: Any, model_client: Any) -> None:
    client = ChatCompletionCache(model_client(endpoint.url, **SETTINGS))
    with record() as recorded:
        for _ in range(2):
            await client.create([UserMessage(content="hello", source="user")])
    assert len(endpoint.received) == 1
    (transition,) = recorded.transitions()
    assert transition.has_ids


async def test_a_client_that_sends_nothing_makes_no_call() -> None:
    with record() as recorded:
        await ReplayChatCompletionClient(["hi"]).create([UserMessage(content="hello", source="user")])
    assert (recorded.episode().ending, recorded.transitions()) == (Ending.NO_CALL, [])


async def test_in_a_rollout_the_gateway_records_and_nothing_is_kept(stack: Any, clients: Any, trial: Any) -> None:
    stack.upstream.script(CallTools([("add", {"a": 1, "b": 2})]))
    with trial.running(), record() as recorded:
        await AssistantAgent("solver", clients(), tools=[add]).run(task="hello")
    assert recorded.episode() is None
    assert recorded.transitions() == []
    assert await trial.agents() == ["solver"]
    assert [o.tool for o in trial.tool_results] == ["add"]
