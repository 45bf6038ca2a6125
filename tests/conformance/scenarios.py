"""The scenarios: each is a script for the model, and the episode that must come of it; and their agents' tools."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from pydantic import BaseModel

from agl_core.testing.scripts import CallTools, Drop, Fail, Say, Step

from .driver import Agent, Cell, Driver, Program, Question, Scenario, Setting, Turn

Block: TypeAlias = list[list[Turn]]


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

_STATUSES = {"broken": "error", "slow": "timeout", "nothing": "empty"}
"""How tools end; the others work."""

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


def _asked(step: Step) -> list[str]:
    """The tools that a reply asks for, also in the text of a ReAct agent."""
    if isinstance(step, CallTools):
        return [name for name, *_ in step.calls]
    in_text = action(step.text) if isinstance(step, Say) else None
    return [in_text[0]] if in_text else []


def _agent(name: str, *says: Step, **more: Any) -> Agent:
    """An agent with this script, and with the tools that it asks for."""
    tools = dict.fromkeys(tool for step in says for tool in _asked(step) if tool in TOOLS)
    return Agent(name, says, tuple(tools), **more)


_SUM = _add(1, 2)
_ALL_FAIL = CallTools([("broken", {}), ("slow", {}), ("nothing", {}), ("add", {"a": 5, "b": 6})])
_DONE = Say("That is all.")
_SOLVER = _agent("solver", CallTools([("add", {"a": 1, "b": 2}), ("multiply", {"a": 3, "b": 4})]), _DONE)
_WORKER = _agent("worker", _look_up("Bern"), Say("Worked."))
_MANAGER = _agent("manager", _ask("worker"), Say("Managed."), experts=(_WORKER,))
_EXPERTS = (
    _agent("historian", _look_up("Bern"), Say("Founded in 1191.")),
    _agent("geographer", _SUM, Say("On the Aare.")),
)

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("parallel tools", "one reply asks for two tools at once", (_SOLVER,)),
    Scenario(
        "structured output",
        "a tool, then an answer that fits a JSON schema",
        (_agent("clerk", _look_up("Bern"), Say('{"name": "Bern", "inhabitants": 137000}'), answers=Town),),
    ),
    Scenario(
        "tool errors",
        "of four tools called at once one raises, one times out, one returns nothing and one works; then one raises "
        "again",
        (_agent("solver", _ALL_FAIL, CallTools([("broken", {})]), _DONE),),
    ),
    Scenario(
        "failed calls, retried",
        "the model server fails or hangs up, and the client's library sends the same request again",
        (_agent("solver", Fail(503), _SUM, Drop(), Fail(500), _DONE),),
    ),
    Scenario(
        "lost replies, retried",
        "a reply is recorded and lost on its way, and the client's library sends the same request again",
        (_agent("solver", _SUM, _add(3, 4), _DONE),),
        lost=frozenset({0, 2}),
    ),
    Scenario(
        "compacted context",
        "earlier messages are dropped from the conversation between turns",
        (_agent("reader", _look_up("Bern"), _look_up("Basel"), _look_up("Thun"), _DONE, keeps=2),),
    ),
    Scenario(
        "interleaved sub-agents",
        "one reply asks two experts at once; each calls a tool of its own while the other does",
        (_agent("boss", _ask("historian", "geographer"), _DONE, experts=_EXPERTS),),
        together={"historian": 1, "geographer": 1},
    ),
    Scenario(
        "hierarchy",
        "an agent calls an agent that calls an agent that calls a tool; the first two go on afterwards",
        (_agent("director", _ask("manager"), _add(2, 2), Say("Directed."), experts=(_MANAGER,)),),
    ),
    Scenario(
        "handoff",
        "an agent uses a tool and hands over; the other goes on with a tool of its own",
        (
            _agent(
                "alice",
                _SUM,
                CallTools([("transfer_to_bob", {})]),
                handoffs=(_agent("bob", _look_up("Bern"), _DONE),),
            ),
        ),
    ),
    Scenario(
        "fifteen tool calls",
        "an episode of fifteen tool calls, one after the other",
        (_agent("solver", *(_add(number, 1) for number in range(15)), _DONE),),
    ),
    Scenario(
        "text ReAct",
        "the agent asks for its tools in plain text: there is no tool call, and no id to join by",
        (_agent("thinker", Say("Action: look_up[Bern]"), Say("Action: look_up[Basel]"), Say("Answer: both.")),),
        react=True,
    ),
    Scenario(
        "samples of one prompt",
        "the very same prompt is sent three times at once: three calls, not one and two retries",
        (_agent("sampler", Say("red"), Say("green"), Say("blue")),),
        samples=3,
        together={"sampler": 3},
    ),
    Scenario(
        "three choices (n)",
        "one call asks for three responses: each is a transition",
        (_agent("sampler", _DONE),),
        choices=3,
    ),
    Scenario(
        "two agents in parallel",
        "two agents work at the same time, with tools of their own",
        (
            _agent("left", _add(1, 1), Say("Two.")),
            _agent("right", _look_up("Bern"), _add(1, 1), Say("A town.")),
        ),
        together={"left": 1, "right": 1},
    ),
    Scenario(
        "shared agent",
        "two rollouts at the same time share one agent that was made before they began",
        (_SOLVER,),
        rollouts=2,
        together={"solver": 2},
    ),
    Scenario(
        "in a thread",
        "the agent runs in a `threading.Thread` with an event loop of its own",
        (_SOLVER,),
        in_thread=True,
    ),
    Scenario(
        "given up",
        "the agent is cancelled during its first call, as by `asyncio.wait_for`, and run again",
        (_SOLVER,),
        given_up=True,
    ),
)


def expected(scenario: Scenario) -> list[Block]:
    """The calls that must be recorded of one rollout, in their order: blocks of branches that run at the same time.

    Each branch keeps its order; between the branches of a block there is none.
    """
    calls = [_calls_of(agent, scenario) for agent in scenario.agents]
    if scenario.samples > 1:
        return [[[call] for ((call,),) in calls[0]]]
    return _beside(calls)


def turns(scenario: Scenario) -> list[Turn]:
    """All of them, branch by branch."""
    return [turn for block in expected(scenario) for branch in block for turn in branch]


def _calls_of(agent: Agent, scenario: Scenario) -> list[Block]:
    """An agent's calls, each followed by those of the experts that it asks, or of the agent that it hands over to."""
    replies = [step for step in agent.says if isinstance(step, Say | CallTools)]
    blocks: list[Block] = []
    for number, reply in enumerate(replies):
        names = _asked(reply)
        results = tuple((name, _STATUSES.get(name, "ok")) for name in names)
        # The last call and its result are kept.
        forgotten = replies[number - 2] if agent.keeps and number > 1 else None
        forgot = look_up(**forgotten.calls[0][1]) if isinstance(forgotten, CallTools) else None
        blocks.append([[Turn(agent.name, number, reply, results, scenario.choices, forgot)]])
        asked = [_calls_of(expert, scenario) for expert in agent.experts if expert.name in names]
        blocks += _beside(asked)
        for other in agent.handoffs:
            blocks += _calls_of(other, scenario) if f"transfer_to_{other.name}" in names else []
    return blocks


def _beside(agents: list[list[Block]]) -> list[Block]:
    """The calls of agents that work at the same time."""
    if len(agents) > 1:
        return [[[call for ((call,),) in blocks] for blocks in agents]]
    return [block for blocks in agents for block in blocks]


class Cast(ABC):
    """The agents of one scenario, in a framework's own classes."""

    remembers = False
    """Its agents keep their conversations: each question has agents of its own."""

    def __init__(self, scenario: Scenario, setting: Setting) -> None:
        self.scenario, self.setting = scenario, setting

    @abstractmethod
    def agent(self, agent: Agent) -> Any:
        """An agent, and those that it asks or hands over to."""

    @abstractmethod
    async def ask(self, agent: Any, task: str) -> Any:
        """The answer of an agent that `agent` made."""

    def tools(self, agent: Agent, tool: Callable[[Any], Any]) -> list[Any]:
        """Its tools and experts, of whose functions the framework's `tool` makes tools."""
        functions = (*(TOOLS[name] for name in agent.tools), *map(self.consulting, agent.experts))
        return [tool(function) for function in functions]

    def consulting(self, expert: Agent) -> Callable[..., Any]:
        """A function with the expert's name, which asks it."""
        agent = self.agent(expert)

        async def consult(task: str) -> str:
            return str(await self.ask(agent, task))

        consult.__name__, consult.__doc__ = expert.name, f"Ask the {expert.name}."
        return consult

    def program(self) -> Program:
        """All agents that are asked, at the same time."""
        made = [] if self.remembers else [self.agent(agent) for agent in self.scenario.asked]

        async def run(question: Question) -> None:
            agents = made or [self.agent(agent) for agent in self.scenario.asked]
            await asyncio.gather(*(self.ask(agent, question.text) for agent in agents))

        return run


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
            if not any(gap.covers(cell) for cell in possible):
                raise ValueError(f"{driver.name}: the gap {gap} covers no cell. Check the names in it.")
        yield from possible
