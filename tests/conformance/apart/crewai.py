"""CrewAI's agents, in crews of one task and as tools."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from crewai import LLM, Crew, Task
from crewai import Agent as CrewAgent
from crewai.hooks import LLMCallHookContext, register_before_llm_call_hook, unregister_before_llm_call_hook
from crewai.tools import tool

from .. import scenarios
from ..driver import Agent, Scenario, Setting
from . import CrewAI

DRIVER = CrewAI


class Cast(scenarios.Cast):
    """LLMs are made once; the crews are made for each question."""

    remembers = True

    def __init__(self, scenario: Scenario, setting: Setting) -> None:
        super().__init__(scenario, setting)
        self._models = {agent.name: self._model(agent) for agent in scenario.everyone()}
        self._forgetful = {agent.name for agent in scenario.everyone() if agent.keeps}

    def agent(self, agent: Agent) -> Callable[[str], Crew]:
        def crew(question: str) -> Crew:
            # Its system prompt begins with "You are ROLE.".
            about = {"role": agent.name, "goal": "Answer.", "backstory": "You know it."}
            member = CrewAgent(llm=self._models[agent.name], tools=self.tools(agent, tool), **about)
            task = Task(description=question, expected_output="An answer.", agent=member)
            return Crew(agents=[member], tasks=[task], verbose=False, cache=False)

        return crew

    async def ask(self, agent: Callable[[str], Crew], task: str) -> Any:
        with _forgetting(self._forgetful):
            return await agent(task).kickoff_async()

    def consulting(self, expert: Agent) -> Callable[..., Any]:
        """CrewAI runs tools in threads."""
        crew = self.agent(expert)

        def consult(task: str) -> str:
            return str(crew(task).kickoff())

        consult.__name__, consult.__doc__ = expert.name, f"Ask the {expert.name}."
        return consult

    def _model(self, agent: Agent) -> LLM:
        return LLM(
            "default",
            provider="openai",
            base_url=self.setting.base_url,
            api_key=self.setting.api_key,
            max_retries=self.setting.retries,
            stream=self.setting.streaming,
            response_format=agent.answers,
            additional_params=self.scenario.sampling,
        )


@contextlib.contextmanager
def _forgetting(names: set[str]) -> Iterator[None]:
    """Meanwhile these agents send the question and their last step alone: the tool calls, and what they gave."""

    def forget(context: LLMCallHookContext) -> None:
        steps = [number for number, message in enumerate(context.messages) if message["role"] == "assistant"]
        if context.agent.role in names and steps:
            del context.messages[2 : steps[-1]]

    register_before_llm_call_hook(forget)
    try:
        yield
    finally:
        unregister_before_llm_call_hook(forget)
