"""Who makes a call, with which context, and what the tools did, in real agents; and episodes without a server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import agents
import openai
import pydantic
import pytest
from agents import Agent, GuardrailFunctionOutput, RunConfig, RunContextWrapper, function_tool
from agents.mcp import MCPServerStdio
from testing_aids import run_python

import agl_core
from agl_core.capture import running, unpack_variables
from agl_core.testing.scripts import CallTools, Say, in_turn
from agl_core.types import Ending, ToolStatus
from agl_openai_agents import AglProcessor, runs

from .responses_upstream import by_agent


def solver(*given: Any, **options: Any) -> Agent[Any]:
    return Agent(name="solver", instructions="solver", model="m", tools=list(given), **options)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@function_tool
def broken() -> str:
    """Fail."""
    raise ValueError("boom")


def named(name: str, **options: Any) -> Agent[Any]:
    """An agent whose instructions are its name, by which scripts tell it."""
    return Agent(name=name, instructions=name, model="m", **options)


LITTLE_TRACING: dict[str, dict[str, Any]] = {
    "untraced": {"tracing_disabled": True},
    "no turn spans": {"tracing": {"include_task_and_turn_spans": False}},
    "no texts": {"trace_include_sensitive_data": False},
}


@pytest.fixture
def two_agents(server: Any) -> Agent[Any]:
    bob = named("bob")
    server.answer = by_agent(
        alice=in_turn(CallTools([("transfer_to_bob", {}, "c1")])), bob=lambda seen: Say("I am bob")
    )
    return named("alice", handoffs=[bob])


@pytest.mark.parametrize("options", LITTLE_TRACING.values(), ids=LITTLE_TRACING.keys())
def test_with_little_tracing(
    options: Any, run_briefly: Any, attached: None, server: Any, attempt: Any, two_agents: Any
) -> None:
    with running(attempt()):
        run_briefly(two_agents, "hello", run_config=RunConfig(**options))
    assert server.agents() == ["alice", "bob"]


def test_the_openai_client_called_in_a_tool_and_in_a_guardrail(
    run_briefly: Any, attached: None, server: Any, attempt: Any
) -> None:
    def raw(text: str) -> None:
        messages: Any = [{"role": "system", "content": "raw"}, {"role": "user", "content": text}]
        openai.OpenAI().chat.completions.create(model="m", messages=messages)

    @function_tool
    def think() -> str:
        """Think."""
        raw("in a tool")
        return "thought"

    @agents.input_guardrail(run_in_parallel=False)
    def on_topic(context: Any, agent: Any, text: Any) -> GuardrailFunctionOutput:
        raw("in a guardrail")
        return GuardrailFunctionOutput(None, tripwire_triggered=False)

    server.answer = by_agent(raw=lambda seen: Say("hm"), solver=in_turn(CallTools([("think", {}, "c1")]), Say("done")))
    with running(attempt()):
        run_briefly(named("solver", tools=[think], input_guardrails=[on_topic]), "hello")
        raw("outside")
    assert [(r.said, r.agent) for r in server.received] == [
        ("in a guardrail", "on_topic"),
        ("hello", "solver"),
        ("in a tool", "solver"),
        ("hello", "solver"),
        ("outside", None),
    ]


@dataclass
class Notes:
    cities: list[str] = field(default_factory=list)
    budget: int = 2
    _client: Any = None


class NotesModel(pydantic.BaseModel):
    cities: list[str] = pydantic.Field(default_factory=list)
    budget: int = 2
    _client: Any = pydantic.PrivateAttr(default_factory=object)


def states(server: Any) -> list[Mapping[str, Any] | None]:
    return [unpack_variables(request.headers.get("x-agl-state")) for request in server.received]


@function_tool
async def look_up(context: RunContextWrapper[Any], what: str) -> str:
    """Look something up."""
    notes = context.context
    if isinstance(notes, dict):
        notes["cities"] = [*notes["cities"], what]
    else:
        notes.cities = [*notes.cities, what]
    # A call of the tool's own.
    client = openai.AsyncOpenAI()
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "by the tool"}])
    return what


@pytest.fixture
def script(server: Any) -> None:
    def reply(seen: Any) -> Any:
        if seen.said == "by the tool":
            return Say("yes")
        return (CallTools([("look_up", {"what": "Bern"}, "c1")]), Say("done"))[min(seen.turns, 1)]

    server.answer = reply


@pytest.mark.parametrize("make", [Notes, NotesModel, lambda: {"cities": [], "budget": 2, "_client": object()}])
def test_each_call_carries_the_context_as_it_is_then(
    make: Any, run_briefly: Any, attached: None, server: Any, attempt: Any, script: None
) -> None:
    context = make()
    with running(attempt()):
        run_briefly(Agent(name="solver", model="m", tools=[look_up]), "hello", context=context)
    assert states(server)[::2] == [{"cities": [], "budget": 2}, {"cities": ["Bern"], "budget": 2}]
    assert server.agents() == ["solver", "solver", "solver"]


def test_what_the_user_tells_wins_and_outlives_the_run(
    run_briefly: Any, attached: None, server: Any, attempt: Any
) -> None:
    with running(attempt()), agl_core.capture.identify("critic"):
        agl_core.state(budget="none", plan="ask")
        run_briefly(Agent(name="solver", model="m"), "hello", context=Notes())
        run_briefly(Agent(name="solver", model="m"), "hello")
    assert states(server) == [
        {"cities": [], "budget": "none", "plan": "ask"},
        {"budget": "none", "plan": "ask"},
    ]
    assert server.agents() == ["critic", "critic"]


@function_tool(failure_error_function=None)
def fatal() -> str:
    """Fail, and the run with it."""
    raise ValueError("boom")


@function_tool(failure_error_function=lambda context, error: "Never mind.")
def soothing() -> str:
    """Fail, in words of the user's own."""
    raise ValueError("boom")


@function_tool(timeout=0.01)
async def slow() -> str:
    """Take too long."""
    await asyncio.sleep(60)
    return "late"


@pytest.fixture
def tool_results(run_briefly: Any, attached: None, server: Any, attempt: Any) -> Any:
    """Runs an agent whose model asks for the given tools, and gives the tool results."""

    def run(*calls: tuple[str, str, Any], tools: Any) -> list[Any]:
        server.answer = in_turn(CallTools([(name, arguments, id) for id, name, arguments in calls]), Say("done"))
        active = attempt()
        with running(active):
            run_briefly(solver(*tools), "hello")
        assert active.recording.problems == ()
        return list(active.recording.tool_results)

    return run


@pytest.mark.parametrize(
    ("tool", "status", "error"),
    [
        (soothing, "error", "ValueError: boom"),
        (slow, "timeout", None),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_failure_that_became_a_text(tool: Any, status: str, error: str, tool_results: Any) -> None:
    (tool_result,) = tool_results(("c1", tool.name, {}), tools=[tool])
    assert (str(tool_result.status), tool_result.error, tool_result.tool_call_id) == (status, error, "c1")


def test_a_failure_that_ends_the_run(run_briefly: Any, attached: None, server: Any, attempt: Any) -> None:
    server.answer = lambda seen: CallTools([("fatal", {}, "c1")])
    active = attempt()
    with running(active), pytest.raises(agents.AgentsException):
        run_briefly(solver(fatal), "hello")
    (tool_result,) = active.recording.tool_results
    assert (tool_result.error, tool_result.tool_call_id) == ("ValueError: boom", "c1")


def test_a_tool_that_calls_a_failing_tool_by_itself_has_not_failed(tool_results: Any) -> None:
    @function_tool
    async def careful(context: agents.RunContextWrapper[Any]) -> str:
        """Try, and do without."""
        return f"did without: {await broken.on_invoke_tool(context, '{}')}"  # type: ignore[arg-type]

    (tool_result,) = tool_results(("c1", "careful", {}), tools=[careful])
    assert (tool_result.tool, tool_result.status) == ("careful", ToolStatus.OK)


def test_an_agent_used_as_a_tool_that_waits_for_approval_has_no_tool_result_yet(
    attached: None, server: Any, attempt: Any, loop: Any
) -> None:
    @function_tool(needs_approval=True)
    def launch() -> str:
        """Launch."""
        return "launched"

    expert = Agent(name="expert", instructions="expert", model="m", tools=[launch])
    boss = Agent(name="boss", instructions="boss", model="m", tools=[expert.as_tool("consult", "Ask the expert.")])
    server.answer = by_agent(
        boss=in_turn(CallTools([("consult", {"input": "why"}, "c1")]), Say("done")),
        expert=in_turn(CallTools([("launch", {}, "e1")]), Say("up")),
    )
    active = attempt()

    async def ask_and_approve() -> Any:
        result = await agents.Runner.run(boss, "hello")
        (interruption,) = result.interruptions
        assert active.recording.tool_results == ()
        state = result.to_state()
        state.approve(interruption)
        return await agents.Runner.run(boss, state)

    with running(active):
        assert loop.run_until_complete(ask_and_approve()).final_output == "done"
    assert [(o.tool_call_id, o.result) for o in active.recording.tool_results] == [("e1", "launched"), ("c1", "up")]


MCP_SERVER = """
try:
    from mcp.server.fastmcp import FastMCP
except ImportError:  # mcp 2
    from mcp.server.mcpserver import MCPServer as FastMCP

server = FastMCP("test")

@server.tool()
def double(number: int) -> int:
    return 2 * number

@server.tool()
def refuse() -> str:
    raise ValueError("refused")

server.run()
"""


def test_tools_of_an_mcp_server(attached: None, server: Any, attempt: Any, loop: Any) -> None:
    server.answer = in_turn(CallTools([("double", {"number": 4}, "c1"), ("refuse", {}, "c2")]), Say("done"))
    active = attempt()

    async def serve_and_run() -> None:
        parameters: Any = {"command": sys.executable, "args": ["-c", MCP_SERVER]}
        async with MCPServerStdio(parameters, client_session_timeout_seconds=60) as mcp_server:
            await agents.Runner.run(solver(mcp_servers=[mcp_server]), "hello")

    with running(active):
        loop.run_until_complete(serve_and_run())
    tool_results = {o.tool_call_id: o for o in active.recording.tool_results}
    assert {id: str(o.status) for id, o in tool_results.items()} == {"c1": "ok", "c2": "error"}
    assert tool_results["c1"].result == {"type": "text", "text": "8"}
    assert tool_results["c2"].result["text"].startswith("Error executing tool refuse")


def test_the_users_own_hooks_and_formatter_work_as_before(
    run_briefly: Any, attached: None, server: Any, attempt: Any
) -> None:
    events: list[Any] = []

    class Hooks(agents.RunHooks[Any]):
        async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
            events.append((tool, result))

    server.answer = in_turn(CallTools([("broken", {}, "c2")]), Say("done"))
    config = RunConfig(tool_error_formatter=lambda args: f"{args.kind}: {args.error}")
    with running(attempt()):
        run_briefly(solver(broken), "hello", hooks=Hooks(), run_config=config)
    assert events == [(broken, "tool_exception: boom")]


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


def sent(exports: Any) -> int:
    agents.flush_traces()
    return len(exports.items)


def test_outside_rollouts_it_goes_on_as_before(
    run_briefly: Any, detached: None, server: Any, attempt: Any, exports: Any
) -> None:
    run_briefly(solver(), "hello")
    before = sent(exports)
    agl_core.attach()
    with running(attempt()):
        run_briefly(solver(), "hello")
    run_briefly(solver(), "hello")
    assert sent(exports) == 2 * before
    agents.add_trace_processor(AglProcessor())
    run_briefly(solver(), "hello")
    assert sent(exports) == 3 * before


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
    run_python(program, cwd=tmp_path)


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
