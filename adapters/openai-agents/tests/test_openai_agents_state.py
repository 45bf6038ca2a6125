"""The context object of a run travels with the calls of its agents, as the state of their transitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import openai
import pydantic
import pytest
from agents import Agent, RunContextWrapper, function_tool

import agl_core
from agl_core.capture import running, unpack_variables
from agl_core.testing.scripts import CallTools, Say


@dataclass
class Notes:
    found: list[str] = field(default_factory=list)
    budget: int = 2
    _client: Any = None


class NotesModel(pydantic.BaseModel):
    found: list[str] = pydantic.Field(default_factory=list)
    budget: int = 2
    _client: Any = pydantic.PrivateAttr(default_factory=object)


class Untold:
    found: tuple[str, ...] = ()


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
    # A call of the tool's own, not of the agent whose context it has.
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
    assert states(server) == [{"found": [], "budget": 2}, None, {"found": ["Bern"], "budget": 2}]
    assert server.agents() == ["solver", "solver", "solver"]


@pytest.mark.parametrize("context", [None, "text", Untold(), Notes], ids=["none", "text", "object", "class"])
def test_a_context_without_names_is_no_state(
    context: Any, run_briefly: Any, attached: None, server: Any, attempt: Any
) -> None:
    with running(attempt()):
        run_briefly(Agent(name="solver", model="m"), "hello", context=context)
    assert states(server) == [None]


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


@pytest.mark.expects_problems
def test_a_context_that_cannot_be_read_is_a_problem_and_breaks_nothing(
    run_briefly: Any, attached: None, server: Any, attempt: Any
) -> None:
    class Torn(dict[str, Any]):
        def keys(self) -> Any:
            raise KeyError("torn")

        __iter__ = keys  # type: ignore[assignment]

    active = attempt()
    with running(active):
        assert run_briefly(Agent(name="solver", model="m"), "hello", context=Torn(a=1)).final_output == "done"
    assert states(server) == [None]
    assert any("Reading the context of a run failed" in problem for problem in active.recording.problems)
