"""What a scenario is: who calls with which tools, what the model answers, and the episode that must come of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pydantic import BaseModel

from agl_core.testing.scripts import CallTools, Say, Step
from agl_core.types import ToolStatus

Reply: TypeAlias = Say | CallTools


@dataclass(frozen=True)
class Agent:
    """One agent, as every framework can build it. Its system prompt is `prompt`, by which the upstream knows it."""

    name: str
    says: tuple[Step, ...]
    """What the model answers it, request by request; failures included."""
    tools: tuple[str, ...] = ()
    """Names of functions in `agl_core.testing.adapters.tools`."""
    experts: tuple[Agent, ...] = ()
    """Agents that it calls as tools: the tool has the expert's name and one argument, `task`."""
    handoffs: tuple[Agent, ...] = ()
    """Agents that it can hand over to, by the tool `transfer_to_NAME`, which has no arguments."""
    answers: type[BaseModel] | None = None
    """The schema of its last answer (structured output)."""
    keeps: int | None = None
    """Of the conversation, only the question and this many last messages are sent."""

    @property
    def prompt(self) -> str:
        return f"You are {self.name}."

    def everyone(self) -> list[Agent]:
        return [self, *(each for below in (*self.experts, *self.handoffs) for each in below.everyone())]


@dataclass(frozen=True)
class Turn:
    """One call that must be recorded, with what came of the tools it asked for."""

    agent: str
    number: int
    """0, 1, … among this agent's calls."""
    reply: Reply
    tool_results: tuple[tuple[str, str], ...] = ()
    """(tool, status) each, in the order of the tool calls."""
    choices: int = 1
    """Responses sampled by this one call, each a transition."""
    forgot: str | None = None
    """What an earlier tool returned, and the prompt of this call no longer holds."""

    def __post_init__(self) -> None:
        for _, status in self.tool_results:
            ToolStatus(status)


@dataclass(frozen=True)
class Parallel:
    """Turns that run at the same time: each branch keeps its order, between branches there is none."""

    branches: tuple[tuple[Turn, ...], ...]

    def __init__(self, *branches: Sequence[Turn]) -> None:
        object.__setattr__(self, "branches", tuple(tuple(each) for each in branches))


Expected: TypeAlias = tuple[Turn | Parallel, ...]


@dataclass(frozen=True)
class Scenario:
    """A script that any framework can play, and the episode that agl must make of it."""

    name: str
    about: str
    """One line for the matrix."""
    agents: tuple[Agent, ...]
    """Those that are asked; several are asked at the same time."""
    expected: Expected
    question: str = "What do you find?"
    samples: int = 1
    """The agent sends the same prompt so many times at once, as calls of their own."""
    choices: int = 1
    """The agent asks for so many responses in one call (`n`)."""
    react: bool = False
    """The agent asks for its tools in plain text (see `agl_core.testing.adapters.tools.action`), not by tool calls."""
    rollouts: int = 1
    """So many rollouts run at once, and share the agent."""
    together: Mapping[str, int] = field(default_factory=dict)
    """How many first requests of which agents are answered only when all of them have arrived."""
    lost: frozenset[int] = frozenset()
    """Requests, in their order, whose reply is recorded and then lost on its way to the agent."""

    def __str__(self) -> str:
        return self.name

    def everyone(self) -> list[Agent]:
        return [each for agent in self.agents for each in agent.everyone()]

    def turns(self) -> list[Turn]:
        """All calls that are expected of one rollout; those that run in parallel, branch by branch."""
        blocks = (([block],) if isinstance(block, Turn) else block.branches for block in self.expected)
        return [turn for branches in blocks for branch in branches for turn in branch]

    def questions(self) -> list[str]:
        """One for each rollout; it distinguishes them if there are several."""
        return [self.question] if self.rollouts == 1 else [f"{self.question} #{n}" for n in range(self.rollouts)]
