"""Watched programs do what they did before: attached without code, as the README says, and towards the vendor."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import agents
import pytest
from agents import Agent, RunConfig
from testing_aids import blocks, run_snippets

import agl_core
from agl_core.capture import running
from agl_core.testing.scripts import CallTools, Say, in_turn
from agl_openai_agents import runs

from .sample_agents import add, broken, solver


def test_the_users_own_hooks_and_formatter_work_as_before(
    run_briefly: Any, attached: None, server: Any, attempt: Any
) -> None:
    told: list[Any] = []

    class Hooks(agents.RunHooks[Any]):
        async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
            told.append((tool, result))

    server.answer = in_turn(CallTools([("broken", {}, "c2")]), Say("done"))
    config = RunConfig(tool_error_formatter=lambda args: f"{args.kind}: {args.error}")
    with running(attempt()):
        run_briefly(solver(broken), "hello", hooks=Hooks(), run_config=config)
    assert told == [(broken, "tool_exception: boom")]


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
    gone = ("agents.run_internal.tool_execution", "_gone", lambda function: function)
    monkeypatch.setattr(runs, "_SEAMS", (gone, *runs._SEAMS))
    agl_core.attach()
    assert "Watching agents.run_internal.tool_execution._gone of the OpenAI Agents SDK failed" in caplog.text
    server.answer = in_turn(CallTools([("add", {"a": 1, "b": 2}, "c1")]), Say("3"))
    active = attempt()
    with running(active):
        run_briefly(solver(add), "hello")
    assert [o.result for o in active.recording.tool_results] == [3]
    assert server.agents() == ["solver", "solver"]


SOLVER = Agent(name="solver", model="m")


def sent(exports: Any) -> int:
    agents.flush_traces()
    return len(exports.items)


def test_outside_rollouts_it_goes_on_as_before(
    run_briefly: Any, detached: None, server: Any, attempt: Any, exports: Any
) -> None:
    run_briefly(SOLVER, "hello")
    before = sent(exports)
    agl_core.attach()
    with running(attempt()):
        run_briefly(SOLVER, "hello")
    run_briefly(SOLVER, "hello")
    assert sent(exports) == 2 * before


def run(program: str, *arguments: str, folder: Path | None = None) -> None:
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr


def test_an_unmodified_agent_is_seen_after_agl_attaches(server: Any) -> None:
    program = """
        import sys
        import agl_core
        from agl_core.capture import ActiveAttempt, Recording, running

        attachment = agl_core.attach()
        assert "agents" not in sys.modules

        from agents import Agent, Runner

        with running(ActiveAttempt("r1", 0, sys.argv[1], "key", Recording())):
            Runner.run_sync(Agent(name="solver", model="m"), "hello")
        assert not attachment.failed
    """
    run(program, server.root)
    assert [(request.rollout, request.agent) for request in server.received] == [("r1/0", "solver")]


def test_a_module_of_the_users_own_that_is_called_agents(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text("names = ['alice']\n")
    program = """
        import logging, sys
        import agl_core

        logging.basicConfig(stream=sys.stdout)
        attachment = agl_core.attach()
        import agents

        assert agents.names == ["alice"]
        assert not attachment.failed, attachment.failed
    """
    run(program, folder=tmp_path)


README = Path(__file__).parent.parent / "README.md"


def test_the_snippets(detached: None, server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = in_turn(CallTools([("add", {"a": 1, "b": 2}, "c1")]), Say("3"))
    assert len(blocks(README, "python")) == 3
    names = run_snippets(README)
    assert names["result"].final_output == "3"
    assert capsys.readouterr().out == blocks(README)[-1]
