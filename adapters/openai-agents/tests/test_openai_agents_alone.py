"""The processor used alone: no server of agl's, any endpoint."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import openai
import pytest

from agl_core.testing.scripts import CallTools, Say, in_turn
from agl_core.types import Ending
from agl_openai_agents import AglProcessor

from .sample_agents import add, broken, solver


@pytest.fixture
def processor(detached: None) -> AglProcessor:
    processor = AglProcessor()
    agents.add_trace_processor(processor)
    return processor


def test_an_agent_with_tools(run_briefly: Any, processor: AglProcessor, server: Any) -> None:
    server.answer = in_turn(CallTools([("add", {"a": 1, "b": 2}, "c1"), ("broken", {}, "c2")]), Say("3"))
    server.returns_ids = True
    run_briefly(solver(add, broken), "1 + 2?")

    (episode,) = processor.episodes()
    assert (episode.ending, episode.unjoined) == (Ending.FINISHED, ())
    assert episode.task.input["workflow_name"] == "Agent workflow"
    first, second = episode.transitions
    assert [(t.agent, t.agent_turn, t.has_ids) for t in (first, second)] == [("solver", 0, True), ("solver", 1, True)]
    assert [(o.tool, o.result, o.error, str(o.status)) for o in first.tool_results] == [
        ("add", 3, None, "ok"),
        ("broken", None, "ValueError: boom", "error"),
    ]
    assert processor.transitions()[0].response == first.response
    assert not {"x-agl-agent", "x-agl-rollout"} & server.received[0].headers.keys(), "the endpoint is none of agl's"


def test_each_run_is_an_episode_and_so_is_a_workflow_of_several(
    processor: AglProcessor, server: Any, loop: Any
) -> None:
    server.answer = lambda seen: Say(f"re: {seen.said}")

    async def several() -> None:
        await asyncio.gather(*(agents.Runner.run(solver(), str(number)) for number in range(5)))
        with agents.trace("both"):
            await agents.Runner.run(solver(), "a")
            await agents.Runner.run(solver(), "b")

    loop.run_until_complete(several())
    *single, both = processor.episodes()
    assert sorted(e.transitions[0].response["content"] for e in single) == [f"re: {number}" for number in range(5)]
    assert all(len(e.transitions) == 1 for e in single)
    assert [t.response["content"] for t in both.transitions] == ["re: a", "re: b"]


def test_an_agent_that_crashes(run_briefly: Any, processor: AglProcessor, no_retries: None, server: Any) -> None:
    def fail(seen: Any) -> Any:
        raise RuntimeError("no model")

    server.answer = fail
    try:
        run_briefly(solver(), "hello")
    except openai.InternalServerError:
        server.answer = lambda seen: Say("done")
        run_briefly(solver(), "again, while the error is being handled")
    crashed, finished = processor.episodes()
    assert (crashed.ending, crashed.transitions) == (Ending.CRASHED, ())
    assert (finished.ending, len(finished.transitions)) == (Ending.FINISHED, 1)


def test_items_that_only_their_own_servers_can_read_are_left_out(
    processor: AglProcessor, server: Any, loop: Any
) -> None:
    searched = {
        "type": "web_search_call",
        "id": "ws",
        "status": "completed",
        "action": {"type": "search", "query": "q"},
    }
    question = [{"role": "user", "content": "hello"}, searched]
    loop.run_until_complete(agents.Runner.run(solver(), question))  # type: ignore[arg-type]
    (transition,) = processor.transitions()
    assert list(transition.messages[1:]) == question[:1]
