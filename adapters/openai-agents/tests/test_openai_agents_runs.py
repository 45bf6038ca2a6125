"""Who makes a call, with which context, and what the tools did, in real agents; and episodes without a server."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agents
import openai
import pytest
from agents import Agent, GuardrailFunctionOutput, RunConfig, RunContextWrapper, Runner, function_tool
from agents.mcp import MCPServerStdio
from agents.models import _openai_shared, openai_provider
from agents.tracing import processors, setup
from running_servers import attempt_maker, scripted_server  # noqa: F401
from testing_aids import run_python

import agl_core
from agl_core.capture import running, unpack_variables
from agl_core.testing.scripts import CallTools, Fail, Received, Say, Step, in_turn
from agl_core.types import Ending
from agl_openai_agents import AglProcessor, runs
from agl_server.testing import no_problems  # noqa: F401


@pytest.fixture(autouse=True)
def exports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the SDK's default processor would send to its vendor. Otherwise the SDK is as it is before anything has
    touched it; what attaches in the test is undone."""
    exports: list[Any] = []
    processor = processors.BatchTraceProcessor(SimpleNamespace(export=exports.extend))
    monkeypatch.setattr(processors, "_global_processor", processor)
    monkeypatch.setattr(setup, "GLOBAL_TRACE_PROVIDER", None)
    monkeypatch.setattr(openai_provider, "_http_client", None)
    monkeypatch.setattr(_openai_shared, "_use_responses_by_default", False)
    for module, name, _ in runs._SEAMS:
        patched = sys.modules[module]
        monkeypatch.setattr(patched, name, inspect.unwrap(getattr(patched, name)))  # another test's may be attached
    yield exports
    agl_core.attach([]).detach()
    processor._shutdown_event.set()


@pytest.fixture
def attached(exports: list[Any]) -> None:
    agl_core.attach()


@pytest.fixture(params=[False, True], ids=["run", "streamed"])
def run(request: pytest.FixtureRequest, server: Any) -> Callable[..., Any]:
    """Both of the SDK's loops."""

    async def run(agent: Any, **options: Any) -> None:
        if not request.param:
            await Runner.run(agent, "hello", **options)
            return
        async for _ in Runner.run_streamed(agent, "hello", **options).stream_events():
            pass

    return run


def named(name: str, *tools: Any, **options: Any) -> Agent[Any]:
    """An agent whose instructions are its name, by which scripts tell it."""
    return Agent(name=name, instructions=name, model="m", tools=list(tools), **options)


def by_agent(**answers: Callable[[Received], Step]) -> Callable[[Received], Step]:
    """Each agent has answers of its own."""
    return lambda received: answers[str(received.items[0]["content"])](received)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@function_tool
def broken() -> str:
    """Fail."""
    raise ValueError("boom")


LITTLE_TRACING: dict[str, dict[str, Any]] = {
    "untraced": {"tracing_disabled": True},
    "no turn spans": {"tracing": {"include_task_and_turn_spans": False}},
    "no texts": {"trace_include_sensitive_data": False},
}


@pytest.mark.parametrize("options", LITTLE_TRACING.values(), ids=LITTLE_TRACING.keys())
async def test_with_little_tracing(options: Any, run: Any, attached: None, server: Any, attempt: Any) -> None:
    server.answer = by_agent(alice=in_turn(CallTools([("transfer_to_bob", {})])), bob=lambda seen: Say("I am bob"))
    with running(attempt()):
        await run(named("alice", handoffs=[named("bob")]), run_config=RunConfig(**options))
    assert server.agents() == ["alice", "bob"]


async def test_the_openai_client_called_in_a_tool_and_in_a_guardrail(
    run: Any, attached: None, server: Any, attempt: Any
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

    server.answer = by_agent(raw=lambda seen: Say("hm"), solver=in_turn(CallTools([("think", {})]), Say("done")))
    with running(attempt()):
        await run(named("solver", think, input_guardrails=[on_topic]))
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


def states(server: Any) -> list[Mapping[str, Any] | None]:
    return [unpack_variables(request.headers.get("x-agl-state")) for request in server.received]


async def test_each_call_carries_the_context_as_it_is_then(run: Any, attached: None, server: Any, attempt: Any) -> None:
    @function_tool
    def look_up(context: RunContextWrapper[Notes], what: str) -> str:
        """Look something up."""
        context.context.cities.append(what)
        return what

    server.answer = in_turn(CallTools([("look_up", {"what": "Bern"})]), Say("done"))
    with running(attempt()):
        await run(named("solver", look_up), context=Notes())
    assert states(server) == [{"cities": [], "budget": 2}, {"cities": ["Bern"], "budget": 2}]


async def test_what_the_user_tells_wins_and_outlives_the_run(
    run: Any, attached: None, server: Any, attempt: Any
) -> None:
    with running(attempt()), agl_core.capture.identify("critic"):
        agl_core.state(budget="none", plan="ask")
        await run(named("solver"), context=Notes())
        await run(named("solver"))
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


@function_tool
async def careful(context: RunContextWrapper[Any]) -> str:
    """Try by itself what fails, and do without."""
    return f"did without: {await broken.on_invoke_tool(context, '{}')}"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tool", "status", "error"),
    [
        (soothing, "error", "ValueError: boom"),
        (slow, "timeout", None),
        (fatal, "error", "ValueError: boom"),
        (careful, "ok", None),
    ],
    ids=lambda value: getattr(value, "name", None),
)
async def test_what_became_of_a_tool_though_the_model_gets_a_text_or_nothing(
    tool: Any, status: str, error: str, run: Any, attached: None, server: Any, attempt: Any
) -> None:
    server.answer = in_turn(CallTools([(tool.name, {}, "c1")]), Say("done"))
    active = attempt()
    with running(active), pytest.raises(agents.AgentsException) if tool is fatal else nullcontext():
        await run(named("solver", tool))
    (result,) = active.recording.tool_results
    assert (result.tool, str(result.status), result.error, result.tool_call_id) == (tool.name, status, error, "c1")


async def test_an_agent_used_as_a_tool_that_waits_for_approval_has_no_tool_result_yet(
    attached: None, server: Any, attempt: Any
) -> None:
    @function_tool(needs_approval=True)
    def launch() -> str:
        """Launch."""
        return "launched"

    boss = named("boss", named("expert", launch).as_tool("consult", "Ask the expert."))
    server.answer = by_agent(
        boss=in_turn(CallTools([("consult", {"input": "why"}, "c1")]), Say("done")),
        expert=in_turn(CallTools([("launch", {}, "e1")]), Say("up")),
    )
    active = attempt()
    with running(active):
        result = await Runner.run(boss, "hello")
        assert active.recording.tool_results == ()
        state = result.to_state()
        state.approve(*result.interruptions)
        assert (await Runner.run(boss, state)).final_output == "done"
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


async def test_tools_of_an_mcp_server(attached: None, server: Any, attempt: Any) -> None:
    server.answer = in_turn(CallTools([("double", {"number": 4}, "c1"), ("refuse", {}, "c2")]), Say("done"))
    active = attempt()
    parameters: Any = {"command": sys.executable, "args": ["-c", MCP_SERVER]}
    async with MCPServerStdio(parameters, client_session_timeout_seconds=60) as mcp_server:
        with running(active):
            await Runner.run(named("solver", mcp_servers=[mcp_server]), "hello")
    tool_results = {o.tool_call_id: o for o in active.recording.tool_results}
    assert {id: str(o.status) for id, o in tool_results.items()} == {"c1": "ok", "c2": "error"}
    assert tool_results["c1"].result == {"type": "text", "text": "8"}
    assert tool_results["c2"].result["text"].startswith("Error executing tool refuse")


@pytest.mark.expects_problems
async def test_a_version_of_the_sdk_without_one_of_the_functions(
    run: Any, server: Any, attempt: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = ("agents.run_internal.tool_execution", "_gone", lambda function: function)
    monkeypatch.setattr(runs, "_SEAMS", (gone, *runs._SEAMS))
    agl_core.attach()
    assert "Watching agents.run_internal.tool_execution._gone of the OpenAI Agents SDK failed" in caplog.text
    server.answer = in_turn(CallTools([("add", {"a": 1, "b": 2})]), Say("3"))
    active = attempt()
    with running(active):
        await run(named("solver", add))
    assert [o.result for o in active.recording.tool_results] == [3]
    assert server.agents() == ["solver", "solver"]


async def test_outside_rollouts_it_goes_on_as_before(run: Any, attempt: Any, exports: Any) -> None:
    async def sent() -> int:
        """The SDK's default processor has sent this so far, after one more run."""
        await run(named("solver"))
        agents.flush_traces()
        return len(exports)

    before = await sent()
    agl_core.attach()
    with running(attempt()):
        assert await sent() == before
    assert await sent() == 2 * before
    agents.add_trace_processor(AglProcessor())
    assert await sent() == 3 * before


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
def processor(exports: list[Any]) -> AglProcessor:
    processor = AglProcessor()
    agents.add_trace_processor(processor)
    return processor


async def test_each_run_is_an_episode_and_so_is_a_workflow_of_several(processor: AglProcessor, server: Any) -> None:
    server.answer = lambda seen: Say(f"re: {seen.said}")
    await asyncio.gather(*(Runner.run(named("solver"), str(number)) for number in range(5)))
    with agents.trace("both"):
        await Runner.run(named("solver"), "a")
        await Runner.run(named("solver"), "b")
    *single, both = processor.episodes()
    assert sorted(t.response["content"] for e in single for t in e.transitions) == [f"re: {n}" for n in range(5)]
    assert [t.response["content"] for t in both.transitions] == ["re: a", "re: b"]


async def test_an_agent_that_crashes(run: Any, processor: AglProcessor, server: Any) -> None:
    server.script(Fail(400))
    try:
        await run(named("solver"))
    except openai.BadRequestError:
        await run(named("solver"))  # again, while the error is being handled
    crashed, finished = processor.episodes()
    assert (crashed.ending, crashed.transitions) == (Ending.CRASHED, ())
    assert (finished.ending, len(finished.transitions)) == (Ending.FINISHED, 1)
