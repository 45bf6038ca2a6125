"""Drivers, which play scenarios with one framework's real API; scenarios; and the cells of the matrix of both."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic import BaseModel

from agl_core.capture import attach
from agl_core.protocols import Adapter
from agl_core.testing.scripts import CallTools, Say, Step

Reply: TypeAlias = Say | CallTools


@dataclass(frozen=True)
class Agent:
    """One agent, as every framework can build it. Its system prompt is `prompt`, by which the upstream knows it."""

    name: str
    says: tuple[Step, ...]
    """The model's replies to it, request by request; failures included."""
    tools: tuple[str, ...] = ()
    """Names of functions in `scenarios.TOOLS`."""
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

    @property
    def schema(self) -> dict[str, Any]:
        return self.answers.model_json_schema() if self.answers else {}

    @property
    def response_format(self) -> dict[str, Any]:
        """The field of chat completions that asks for an answer by the schema, if there is one."""
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.schema}}
        return {"response_format": form} if self.answers else {}

    def everyone(self) -> list[Agent]:
        return [self, *(agent for below in (*self.experts, *self.handoffs) for agent in below.everyone())]


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
    """A text that an earlier tool returned, and that the prompt of this call no longer holds."""


@dataclass(frozen=True)
class Scenario:
    """A script that any framework can play; `scenarios.expected` is the episode that agl must make of it."""

    name: str
    about: str
    """One line for the matrix."""
    agents: tuple[Agent, ...]
    """Those that are asked; several are asked at the same time."""
    question: str = "What do you find?"
    samples: int = 1
    """The agent sends the same prompt so many times at once, as calls of their own."""
    choices: int = 1
    """The agent asks for so many responses in one call (`n`)."""
    react: bool = False
    """The agent asks for its tools in plain text (see `scenarios.action`), not by tool calls."""
    rollouts: int = 1
    """So many rollouts run at once, and share the agent."""
    together: Mapping[str, int] = field(default_factory=dict)
    """How many first requests of which agents are answered only when all of them have arrived."""
    lost: frozenset[int] = frozenset()
    """Requests, in their order, whose reply is recorded and then lost on its way to the agent."""
    in_thread: bool = False
    """The agent runs in a thread of its own, which inherits no context."""
    given_up: bool = False
    """The agent is cancelled during its first call, whose reply comes too late, and run again."""

    def __str__(self) -> str:
        return self.name

    @property
    def asked(self) -> list[Agent]:
        """The agents that are asked, each as often as it is."""
        return [agent for agent in self.agents for _ in range(self.samples)]

    @property
    def sampling(self) -> dict[str, Any]:
        """The field of chat completions that asks for several responses, if they are several."""
        return {"n": self.choices} if self.choices > 1 else {}

    def everyone(self) -> list[Agent]:
        return [member for agent in self.agents for member in agent.everyone()]

    def questions(self) -> list[str]:
        """One for each rollout; it distinguishes them if there are several."""
        return [self.question] if self.rollouts == 1 else [f"{self.question} #{n}" for n in range(self.rollouts)]


CHAT, RESPONSES, MESSAGES = "chat completions", "Responses", "Messages"
API_NAMES = {CHAT: "chat.completions", RESPONSES: "responses", MESSAGES: "messages"}
"""How records name the APIs."""

ATTACH = "attach"
"""The form in which the agent's code has no line of agl: everything installed is attached, as agl's workers do."""


@dataclass(frozen=True)
class Setting:
    """How a driver is to play: a column of the matrix, and where the Lightning Server is."""

    api: str
    streaming: bool
    form: str
    root: str
    """The server's address without a path. A client made from it alone belongs to no rollout until it is stamped."""
    api_key: str
    """The arguments of such a client; the stamp brings the attempt's own key."""
    retries: int = 2
    """How often clients are to send a failed request again."""

    @property
    def base_url(self) -> str:
        return f"{self.root}/v1"


@dataclass(frozen=True)
class Question:
    """The question of one rollout to the agent."""

    text: str
    root: str
    """The attempt's own address, whose path names the rollout, for agents that nothing stamps."""
    api_key: str
    """The attempt's own key, for these."""


Program: TypeAlias = Callable[[Question], Awaitable[None]]
"""The agent, made once; concurrent rollouts may run it."""


@dataclass(frozen=True)
class Gap:
    """Cells that cannot pass, and why. An empty selection stands for all."""

    scenario: str
    reason: str
    """One sentence for the matrix."""
    apis: tuple[str, ...] = ()
    streaming: tuple[bool, ...] = ()
    forms: tuple[str, ...] = ()

    def covers(self, cell: Cell) -> bool:
        return (
            self.scenario == cell.scenario.name
            and cell.api in (self.apis or (cell.api,))
            and cell.streaming in (self.streaming or (cell.streaming,))
            and cell.form in (self.forms or (cell.form,))
        )


class Driver(ABC):
    """Plays scenarios with one framework. Everything a subclass declares shows in the matrix.

    `build` makes the scenario's agents as a user would; the program it returns is run once for each rollout, inside
    it. Play only what the framework's real API does. A scenario that it cannot express is declared in `gaps` with the
    reason; NotImplementedError says so where another one would be played instead.
    """

    name: str
    """The framework, and the adapter if there is one."""
    apis: Sequence[str]
    """Those of CHAT, RESPONSES and MESSAGES that it speaks."""
    streaming: Sequence[bool] = (False, True)
    forms: Sequence[str] = (ATTACH,)
    """The ways to bring agl in: ATTACH, and the adapter's one-line forms, named as the user writes them."""
    gaps: Sequence[Gap] = ()

    @abstractmethod
    def build(self, scenario: Scenario, setting: Setting) -> Program:
        """Make the agents, outside any rollout."""

    @contextlib.contextmanager
    def attached(self, form: str) -> Iterator[None]:
        """The adapters that are installed in the process meanwhile: all of them for ATTACH, else `adapters`."""
        attachment = attach(None if form == ATTACH else self.adapters(form))
        try:
            assert attachment.failed == {}
            yield
        finally:
            attachment.detach()

    def adapters(self, form: str) -> Sequence[Adapter]:
        """The adapters besides a one-line form; requests are stamped in any case, as workers do."""
        return ()


@dataclass(frozen=True)
class Cell:
    """One scenario as one driver plays it."""

    scenario: Scenario
    driver: Driver
    api: str
    streaming: bool
    form: str

    def __str__(self) -> str:
        streaming = "streaming" if self.streaming else "not streaming"
        return f"{self.driver.name} | {self.api} | {streaming} | {self.form} | {self.scenario}"

    @property
    def is_played_alone(self) -> bool:
        """True if it can be played without a server: by clients of the API that the scripted model speaks itself."""
        return self.api == CHAT and self.form == ATTACH and self.gap is None and not self.scenario.lost

    @property
    def gap(self) -> str | None:
        """Why it cannot pass; None if it has to."""
        return next((gap.reason for gap in self.driver.gaps if gap.covers(self)), None)
