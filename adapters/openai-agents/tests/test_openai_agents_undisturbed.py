"""Programs whose tools are watched do what they did before, whatever happens to those who watch."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import pytest
from agents import RunConfig, function_tool

from agl_core.capture import running
from agl_core.testing.scripts import CallTools, Say, in_turn
from agl_openai_agents import runs

from .sample_agents import add, broken, slow_in_own_words, solver


def test_the_users_own_hooks_and_formatter_work_as_before(
    run_briefly: Any, attached: None, server: Any, attempt: Any
) -> None:
    told: list[Any] = []

    class Hooks(agents.RunHooks[Any]):
        async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
            told.append((tool, result))

    server.answer = in_turn(CallTools([("slow_in_own_words", {}, "c1"), ("broken", {}, "c2")]), Say("done"))
    config = RunConfig(tool_error_formatter=lambda args: f"{args.kind}: {args.error}")
    with running(attempt()):
        run_briefly(solver(slow_in_own_words, broken), "hello", hooks=Hooks(), run_config=config)
    assert sorted(told, key=lambda each: str(each[1])) == [
        (slow_in_own_words, "Later, perhaps."),
        (broken, "tool_exception: boom"),
    ]


def test_a_run_that_is_cancelled_in_a_tool_is_cancelled(attached: None, server: Any, attempt: Any, loop: Any) -> None:
    started = asyncio.Event()

    @function_tool
    async def forever() -> str:
        """Never end."""
        started.set()
        await asyncio.Event().wait()
        return ""

    server.answer = lambda seen: CallTools([("forever", {}, "c1")])
    active = attempt()

    async def cancel() -> None:
        task = asyncio.create_task(agents.Runner.run(solver(forever), "hello"))
        await asyncio.wait_for(started.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with running(active):
        loop.run_until_complete(cancel())
    assert active.recording.tool_results == ()


@pytest.mark.expects_problems
def test_an_adapter_that_fails_does_not_break_the_agent(
    run_briefly: Any,
    attached: None,
    server: Any,
    attempt: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(runs, "tool_result_report", fail)
    server.answer = in_turn(CallTools([("add", {"a": 1, "b": 2}, "c1"), ("broken", {}, "c2")]), Say("3"))
    active = attempt()
    with running(active):
        assert run_briefly(solver(add, broken), "hello").final_output == "3"
    assert any("KeyError" in problem for problem in active.recording.problems)
    assert {(request.rollout, request.agent) for request in server.received} == {("r1/0", "solver")}


@pytest.mark.expects_problems
def test_a_version_of_the_sdk_without_one_of_the_functions(
    run_briefly: Any,
    detached: None,
    server: Any,
    attempt: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import agl_openai_agents

    gone = ("agents.run_internal.tool_execution", "_gone", lambda function: function)
    monkeypatch.setattr(runs, "_SEAMS", (gone, *runs._SEAMS))
    agl_openai_agents.attach()
    assert "Watching agents.run_internal.tool_execution._gone of the OpenAI Agents SDK failed" in caplog.text
    server.answer = in_turn(CallTools([("add", {"a": 1, "b": 2}, "c1")]), Say("3"))
    active = attempt()
    with running(active):
        run_briefly(solver(add), "hello")
    assert [o.result for o in active.recording.tool_results] == [3]
    assert server.agents() == ["solver", "solver"]
