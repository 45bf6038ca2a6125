"""CrewAI's agents, in crews of one task and as tools."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from crewai import LLM, Crew, Task
from crewai import Agent as CrewAgent
from crewai.hooks import LLMCallHookContext, register_before_llm_call_hook, unregister_before_llm_call_hook
from crewai.tools import BaseTool
from pydantic import BaseModel, PrivateAttr, create_model

from ..driver import Agent, Program, Question, Scenario, Setting
from ..scenarios import TOOLS
from . import CrewAI

DRIVER = CrewAI


def program(scenario: Scenario, setting: Setting) -> Program:
    """The scenario's LLMs, made once; the crews are made for each question."""
    everyone = scenario.everyone()
    if scenario.react or any(agent.handoffs for agent in everyone):
        raise NotImplementedError
    models = {agent.name: _model(agent, scenario, setting) for agent in everyone}
    forgetful = {agent.name for agent in everyone if agent.keeps}

    async def run(question: Question) -> None:
        crews = [_crew(agent, models, question.text) for agent in scenario.asked]
        with _forgetting(forgetful):
            await asyncio.gather(*(crew.kickoff_async() for crew in crews))

    return run


def _model(agent: Agent, scenario: Scenario, setting: Setting) -> LLM:
    return LLM(
        "default",
        provider="openai",
        base_url=setting.base_url,
        api_key=setting.api_key,
        max_retries=setting.retries,
        stream=setting.streaming,
        response_format=agent.answers,
        additional_params=scenario.sampling,
    )


def _crew(agent: Agent, models: Mapping[str, LLM], question: str) -> Crew:
    tools = [
        *(FunctionTool(TOOLS[name]) for name in agent.tools),
        *(_consulting(expert, models) for expert in agent.experts),
    ]
    # Its system prompt begins with "You are ROLE.".
    member = CrewAgent(role=agent.name, goal="Answer.", backstory="You know it.", llm=models[agent.name], tools=tools)
    task = Task(description=question, expected_output="An answer.", agent=member)
    return Crew(agents=[member], tasks=[task], verbose=False, cache=False)


def _consulting(expert: Agent, models: Mapping[str, LLM]) -> BaseTool:
    def ask(task: str) -> str:
        return str(_crew(expert, models, task).kickoff())

    ask.__name__, ask.__doc__ = expert.name, f"Ask the {expert.name}."
    return FunctionTool(ask)


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


class FunctionTool(BaseTool):  # type: ignore[misc]
    """A function as a tool."""

    _function: Callable[..., Any] = PrivateAttr()

    def __init__(self, function: Callable[..., Any]) -> None:
        kinds = {"int": int, "str": str}
        given = {name: (kinds[kind], ...) for name, kind in function.__annotations__.items() if name != "return"}
        schema: type[BaseModel] = create_model(function.__name__, **given)  # type: ignore[call-overload]
        super().__init__(name=function.__name__, description=function.__doc__ or "", args_schema=schema)
        self._function = function

    def _run(self, **given: Any) -> Any:
        return self._function(**given)
