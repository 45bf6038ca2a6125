"""Who makes a call, for which attempt and with which context, on every request of real agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import agents
import openai
import pydantic
import pytest
from agents import Agent, GuardrailFunctionOutput, RunConfig, RunContextWrapper, function_tool

import agl_core
from agl_core.capture import running, unpack_variables
from agl_core.testing.scripts import CallTools, Say, by_agent, in_turn


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
    def raw(said: str) -> None:
        messages: Any = [{"role": "system", "content": "raw"}, {"role": "user", "content": said}]
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
    found: list[str] = field(default_factory=list)
    budget: int = 2
    _client: Any = None


class NotesModel(pydantic.BaseModel):
    found: list[str] = pydantic.Field(default_factory=list)
    budget: int = 2
    _client: Any = pydantic.PrivateAttr(default_factory=object)


def states(server: Any) -> list[Mapping[str, Any] | None]:
    return [unpack_variables(request.headers.get("x-agl-state")) for request in server.received]


@function_tool
async def look_up(context: RunContextWrapper[Any], what: str) -> str:
    """Look something up."""
    notes = context.context
    if isinstance(notes, dict):
        notes["found"] = [*notes["found"], what]
    else:
        notes.found = [*notes.found, what]
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


@pytest.mark.parametrize("make", [Notes, NotesModel, lambda: {"found": [], "budget": 2, "_client": object()}])
def test_each_call_carries_the_context_as_it_is_then(
    make: Any, run_briefly: Any, attached: None, server: Any, attempt: Any, script: None
) -> None:
    context = make()
    with running(attempt()):
        run_briefly(Agent(name="solver", model="m", tools=[look_up]), "hello", context=context)
    assert states(server)[::2] == [{"found": [], "budget": 2}, {"found": ["Bern"], "budget": 2}]
    assert server.agents() == ["solver", "solver", "solver"]


def test_what_the_user_tells_wins_and_outlives_the_run(
    run_briefly: Any, attached: None, server: Any, attempt: Any
) -> None:
    with running(attempt()), agl_core.capture.identify("critic"):
        agl_core.state(budget="none", plan="ask")
        run_briefly(Agent(name="solver", model="m"), "hello", context=Notes())
        run_briefly(Agent(name="solver", model="m"), "hello")
    assert states(server) == [
        {"found": [], "budget": "none", "plan": "ask"},
        {"budget": "none", "plan": "ask"},
    ]
    assert server.agents() == ["critic", "critic"]
