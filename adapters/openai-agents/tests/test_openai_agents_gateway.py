"""Real agents through agl's own gateway: what it records, joined with what the adapter tells."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import agents
import openai
import pytest
from agents import Agent, OpenAIChatCompletionsModel
from sample_agents import add, broken
from scripted_upstream import CallTools, Say
from stack import make_rollout, stack_in_thread

from agl_core.capture import ActiveAttempt, Recording, running
from agl_core.learning import build_episode
from agl_core.types import Attempt, Ending, Episode, Outcome, OutcomeStatus


@pytest.fixture
def gateway() -> Iterator[Any]:
    with stack_in_thread() as found:
        yield found


def run_in_rollout(gateway: Any, agent: Agent[Any], streamed: bool, loop: Any) -> Episode:
    """Runs the agent in a leased attempt, and builds the episode of what was recorded."""
    root = gateway.stack.server.base_url
    active = ActiveAttempt(*gateway.key, base_url=root, api_key=gateway.api_key, recording=Recording())

    async def work() -> None:
        if streamed:
            async for _ in agents.Runner.run_streamed(agent, "hello").stream_events():
                pass
        else:
            await agents.Runner.run(agent, "hello")

    with running(active):
        loop.run_until_complete(work())
    assert active.recording.problems == ()
    calls = asyncio.run_coroutine_threadsafe(gateway.stack.calls(gateway.key), gateway.loop).result(20)
    rollout, number = gateway.key
    outcomes = [Outcome(rollout=rollout, attempt=number, **r.model_dump()) for r in active.recording.outcomes]
    attempt = Attempt(rollout, number, "w", 0.0, 1.0, Ending.FINISHED)
    return build_episode(make_rollout(rollout), attempt, calls, outcomes)


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_handoff_and_an_agent_as_a_tool(streamed: bool, gateway: Any, attached: None, loop: Any) -> None:
    client = openai.AsyncOpenAI(base_url=f"{gateway.stack.server.base_url}/v1", api_key=gateway.api_key)
    model = OpenAIChatCompletionsModel("default", client)
    expert = Agent(name="expert", model=model)
    bob = Agent(name="bob", model=model, tools=[add, broken])
    alice = Agent(name="alice", model=model, tools=[expert.as_tool("consult", "Ask.")], handoffs=[bob])
    gateway.stack.upstream.script(
        CallTools([("consult", {"input": "who?"})]),
        Say("bob"),
        CallTools([("transfer_to_bob", {})]),
        CallTools([("add", {"a": 1, "b": 2}), ("broken", {})]),
        Say("3"),
    )
    episode = run_in_rollout(gateway, alice, streamed, loop)
    assert episode.unjoined == ()
    assert [t.agent for t in episode.transitions] == ["alice", "expert", "alice", "bob", "bob"]
    assert all(t.has_ids for t in episode.transitions)
    assert [[(o.tool, o.status) for o in t.outcomes] for t in episode.transitions] == [
        [("consult", OutcomeStatus.OK)],
        [],
        [("transfer_to_bob", OutcomeStatus.OK)],
        [("add", OutcomeStatus.OK), ("broken", OutcomeStatus.ERROR)],
        [],
    ]
    assert episode.transitions[3].outcomes[1].error == "ValueError: boom"
