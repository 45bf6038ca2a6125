"""What drivers of frameworks have in common: they make an agent with its tools, and ask it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from .driver import Agent, Program, Question, Scenario, Setting
from .scenarios import TOOLS


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
