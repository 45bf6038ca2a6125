"""The scenarios: each is a script for the model, and the episode that must come of it; and their agents' tools."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from agl_core.testing.scripts import CallTools, Drop, Fail, Say

from .driver import Agent, Cell, Driver, Parallel, Scenario, Turn


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def look_up(topic: str) -> str:
    """Look a topic up."""
    return f"{topic} is a town."


def broken() -> str:
    """Fail."""
    raise ValueError("boom")


def slow() -> str:
    """Take too long."""
    raise TimeoutError("no answer in 5 seconds, timed out")


def nothing() -> str:
    """Find nothing."""
    return ""


TOOLS: dict[str, Callable[..., Any]] = {tool.__name__: tool for tool in (add, multiply, look_up, broken, slow, nothing)}

_ACTION = re.compile(r"Action: (\w+)\[(.*)\]")


def action(text: str) -> tuple[str, str] | None:
    """The tool and its one argument that a ReAct text asks for; None if it is an answer.

    >>> action("Thought: a town. Action: look_up[Bern]")
    ('look_up', 'Bern')
    """
    match = _ACTION.search(text)
    return (match[1], match[2]) if match else None


class Town(BaseModel):
    """A town."""

    name: str
    inhabitants: int


def _look_up(topic: str) -> CallTools:
    return CallTools([("look_up", {"topic": topic})])


def _add(a: int, b: int) -> CallTools:
    return CallTools([("add", {"a": a, "b": b})])


def _ask(*names: str) -> CallTools:
    return CallTools([(name, {"task": f"Tell me, {name}."}) for name in names])


_SUM = _add(1, 2)
_BOTH = CallTools([("add", {"a": 1, "b": 2}), ("multiply", {"a": 3, "b": 4})])
_ALL_FAIL = CallTools([("broken", {}), ("slow", {}), ("nothing", {}), ("add", {"a": 5, "b": 6})])
_TOWN = Say('{"name": "Bern", "inhabitants": 137000}')
_DONE = Say("That is all.")
_LOOKED = ("look_up", "ok")
_ADDED = ("add", "ok")

PARALLEL_TOOLS = Scenario(
    "parallel tools",
    "one reply asks for two tools at once",
    (Agent("solver", (_BOTH, _DONE), tools=("add", "multiply")),),
    (Turn("solver", 0, _BOTH, (_ADDED, ("multiply", "ok"))), Turn("solver", 1, _DONE)),
)

STRUCTURED_OUTPUT = Scenario(
    "structured output",
    "a tool, then an answer that fits a JSON schema",
    (Agent("clerk", (_look_up("Bern"), _TOWN), tools=("look_up",), answers=Town),),
    (Turn("clerk", 0, _look_up("Bern"), (_LOOKED,)), Turn("clerk", 1, _TOWN)),
)

TOOL_ERRORS = Scenario(
    "tool errors",
    "of four tools called at once one raises, one times out, one returns nothing and one works; then one raises again",
    (
        Agent(
            "solver",
            (_ALL_FAIL, CallTools([("broken", {})]), _DONE),
            tools=("broken", "slow", "nothing", "add"),
        ),
    ),
    (
        Turn("solver", 0, _ALL_FAIL, (("broken", "error"), ("slow", "timeout"), ("nothing", "empty"), _ADDED)),
        Turn("solver", 1, CallTools([("broken", {})]), (("broken", "error"),)),
        Turn("solver", 2, _DONE),
    ),
)

FAILED_AND_RETRIED = Scenario(
    "failed calls, retried",
    "the model server fails or hangs up, and the client's library sends the same request again",
    (Agent("solver", (Fail(503), _SUM, Drop(), Fail(500), _DONE), tools=("add",)),),
    (Turn("solver", 0, _SUM, (_ADDED,)), Turn("solver", 1, _DONE)),
)

LOST_AND_RETRIED = Scenario(
    "lost replies, retried",
    "a reply is recorded and lost on its way, and the client's library sends the same request again",
    (Agent("solver", (_SUM, _add(3, 4), _DONE), tools=("add",)),),
    (Turn("solver", 0, _SUM, (_ADDED,)), Turn("solver", 1, _add(3, 4), (_ADDED,)), Turn("solver", 2, _DONE)),
    lost=frozenset({0, 2}),
)

COMPACTED_CONTEXT = Scenario(
    "compacted context",
    "earlier messages are dropped from the conversation between turns",
    (
        Agent(
            "reader",
            (_look_up("Bern"), _look_up("Basel"), _look_up("Thun"), _DONE),
            tools=("look_up",),
            keeps=2,
        ),
    ),
    (
        Turn("reader", 0, _look_up("Bern"), (_LOOKED,)),
        Turn("reader", 1, _look_up("Basel"), (_LOOKED,)),
        Turn("reader", 2, _look_up("Thun"), (_LOOKED,), forgot="Bern is a town."),
        Turn("reader", 3, _DONE, forgot="Basel is a town."),
    ),
)

SUB_AGENTS = Scenario(
    "interleaved sub-agents",
    "one reply asks two experts at once; each calls a tool of its own while the other does",
    (
        Agent(
            "boss",
            (_ask("historian", "geographer"), _DONE),
            experts=(
                Agent("historian", (_look_up("Bern"), Say("Founded in 1191.")), tools=("look_up",)),
                Agent("geographer", (_add(1, 2), Say("On the Aare.")), tools=("add",)),
            ),
        ),
    ),
    (
        Turn("boss", 0, _ask("historian", "geographer"), (("historian", "ok"), ("geographer", "ok"))),
        Parallel(
            (Turn("historian", 0, _look_up("Bern"), (_LOOKED,)), Turn("historian", 1, Say("Founded in 1191."))),
            (Turn("geographer", 0, _add(1, 2), (_ADDED,)), Turn("geographer", 1, Say("On the Aare."))),
        ),
        Turn("boss", 1, _DONE),
    ),
    together={"historian": 1, "geographer": 1},
)

HIERARCHY = Scenario(
    "hierarchy",
    "an agent calls an agent that calls an agent that calls a tool; the first two go on afterwards",
    (
        Agent(
            "director",
            (_ask("manager"), _add(2, 2), Say("Directed.")),
            tools=("add",),
            experts=(
                Agent(
                    "manager",
                    (_ask("worker"), Say("Managed.")),
                    experts=(Agent("worker", (_look_up("Bern"), Say("Worked.")), tools=("look_up",)),),
                ),
            ),
        ),
    ),
    (
        Turn("director", 0, _ask("manager"), (("manager", "ok"),)),
        Turn("manager", 0, _ask("worker"), (("worker", "ok"),)),
        Turn("worker", 0, _look_up("Bern"), (_LOOKED,)),
        Turn("worker", 1, Say("Worked.")),
        Turn("manager", 1, Say("Managed.")),
        Turn("director", 1, _add(2, 2), (_ADDED,)),
        Turn("director", 2, Say("Directed.")),
    ),
)

HANDOFF = Scenario(
    "handoff",
    "an agent uses a tool and hands over; the other goes on with a tool of its own",
    (
        Agent(
            "alice",
            (_SUM, CallTools([("transfer_to_bob", {})])),
            tools=("add",),
            handoffs=(Agent("bob", (_look_up("Bern"), _DONE), tools=("look_up",)),),
        ),
    ),
    (
        Turn("alice", 0, _SUM, (_ADDED,)),
        Turn("alice", 1, CallTools([("transfer_to_bob", {})]), (("transfer_to_bob", "ok"),)),
        Turn("bob", 0, _look_up("Bern"), (_LOOKED,)),
        Turn("bob", 1, _DONE),
    ),
)

FIFTEEN_CALLS = Scenario(
    "fifteen tool calls",
    "an episode of fifteen tool calls, one after the other",
    (Agent("solver", (*(_add(number, 1) for number in range(15)), _DONE), tools=("add",)),),
    (*(Turn("solver", number, _add(number, 1), (_ADDED,)) for number in range(15)), Turn("solver", 15, _DONE)),
)

TEXT_REACT = Scenario(
    "text ReAct",
    "the agent asks for its tools in plain text: there is no tool call, and no id to join by",
    (
        Agent(
            "thinker",
            (Say("Action: look_up[Bern]"), Say("Action: look_up[Basel]"), Say("Answer: both.")),
            tools=("look_up",),
        ),
    ),
    (
        Turn("thinker", 0, Say("Action: look_up[Bern]"), (_LOOKED,)),
        Turn("thinker", 1, Say("Action: look_up[Basel]"), (_LOOKED,)),
        Turn("thinker", 2, Say("Answer: both.")),
    ),
    react=True,
)

SAMPLES = Scenario(
    "samples of one prompt",
    "the very same prompt is sent three times at once: three calls, not one and two retries",
    (Agent("sampler", (Say("red"), Say("green"), Say("blue"))),),
    (
        Parallel(
            [Turn("sampler", 0, Say("red"))], [Turn("sampler", 1, Say("green"))], [Turn("sampler", 2, Say("blue"))]
        ),
    ),
    samples=3,
    together={"sampler": 3},
)

CHOICES = Scenario(
    "three choices (n)",
    "one call asks for three responses: each is a transition",
    (Agent("sampler", (_DONE,)),),
    (Turn("sampler", 0, _DONE, choices=3),),
    choices=3,
)

TWO_AGENTS = Scenario(
    "two agents in parallel",
    "two agents work at the same time, with tools of their own",
    (
        Agent("left", (_add(1, 1), Say("Two.")), tools=("add",)),
        Agent("right", (_look_up("Bern"), _add(1, 1), Say("A town.")), tools=("look_up", "add")),
    ),
    (
        Parallel(
            (Turn("left", 0, _add(1, 1), (_ADDED,)), Turn("left", 1, Say("Two."))),
            (
                Turn("right", 0, _look_up("Bern"), (_LOOKED,)),
                Turn("right", 1, _add(1, 1), (_ADDED,)),
                Turn("right", 2, Say("A town.")),
            ),
        ),
    ),
    together={"left": 1, "right": 1},
)

SHARED_AGENT = Scenario(
    "shared agent",
    "two rollouts at the same time share one agent that was made before they began",
    (Agent("solver", (_BOTH, _DONE), tools=("add", "multiply")),),
    (Turn("solver", 0, _BOTH, (_ADDED, ("multiply", "ok"))), Turn("solver", 1, _DONE)),
    rollouts=2,
    together={"solver": 2},
)

IN_A_THREAD = replace(
    PARALLEL_TOOLS,
    name="in a thread",
    about="the agent runs in a `threading.Thread` with an event loop of its own",
    in_thread=True,
)

GIVEN_UP = replace(
    PARALLEL_TOOLS,
    name="given up",
    about="the agent is cancelled during its first call, as by `asyncio.wait_for`, and run again",
    given_up=True,
)

SCENARIOS: tuple[Scenario, ...] = (
    PARALLEL_TOOLS,
    STRUCTURED_OUTPUT,
    TOOL_ERRORS,
    FAILED_AND_RETRIED,
    LOST_AND_RETRIED,
    COMPACTED_CONTEXT,
    SUB_AGENTS,
    HIERARCHY,
    HANDOFF,
    FIFTEEN_CALLS,
    TEXT_REACT,
    SAMPLES,
    CHOICES,
    TWO_AGENTS,
    SHARED_AGENT,
    IN_A_THREAD,
    GIVEN_UP,
)


def cells(drivers: Sequence[Driver]) -> Iterator[Cell]:
    """All cells; ValueError if a gap covers none.

    The first form is played throughout, the others with one of both streaming modes for each API, in turn.
    """
    for driver in drivers:
        possible = [
            Cell(scenario, driver, api, streaming, form)
            for scenario in SCENARIOS
            for number, api in enumerate(driver.apis)
            for streaming in driver.streaming
            for form in driver.forms
            if form == driver.forms[0] or streaming is driver.streaming[~number % len(driver.streaming)]
        ]
        for gap in driver.gaps:
            if not any(gap.covers(cell.scenario.name, cell.api, cell.streaming, cell.form) for cell in possible):
                raise ValueError(f"{driver.name}: the gap {gap} covers no cell. Check the names in it.")
        yield from possible
