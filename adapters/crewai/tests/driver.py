"""CrewAI's agents and crews as the scenarios of the conformance suite need them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from crewai import LLM, Crew
from crewai.tools import BaseTool
from pydantic import BaseModel, PrivateAttr, create_model

import agl_crewai
from agl_core.testing.adapters import (
    ATTACH,
    CHAT,
    MESSAGES,
    RESPONSES,
    Agent,
    Driver,
    Gap,
    InexpressibleError,
    Program,
    Question,
    Scenario,
    Setting,
)
from agl_core.testing.adapters.tools import TOOLS

from .world import agent_of, crew_of, llm_of, task_of

ONE_LINE = "agl_crewai.attach()"


class CrewAI(Driver):
    """Each agent has a crew of one task. Experts are tools that start a crew of their own.

    CrewAI's agents and tasks keep what they did: rollouts share the LLM, and each has a crew of its own.
    """

    name = "CrewAI (agl-crewai)"
    apis = (CHAT,)
    without = {  # noqa: RUF012
        RESPONSES: "The tests play CrewAI's default API.",
        MESSAGES: "The tests play CrewAI's default API.",
    }
    forms = (ATTACH, ONE_LINE)
    gaps = (
        Gap("handoff", "CrewAI has no handoff: delegated work returns to the agent that delegated it."),
        Gap("compacted context", "CrewAI shortens a conversation only when a model refuses its length."),
        Gap("text ReAct", "CrewAI has a text format of its own, which is tested apart."),
        Gap("structured output", "CrewAI asks for it in a call of its own."),
    )

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        everyone = scenario.everyone()
        if scenario.react or any(each.handoffs or each.keeps or each.answers for each in everyone):
            raise InexpressibleError
        if setting.form == ONE_LINE:
            agl_crewai.attach()
        options = {"additional_params": {"n": scenario.choices}} if scenario.choices > 1 else {}
        llm = llm_of(
            setting.base_url, setting.api_key, max_retries=setting.retries, stream=setting.streaming, **options
        )

        async def program(question: Question) -> None:
            crews = [_crew(each, llm, question.text) for each in scenario.agents for _ in range(scenario.samples)]
            await asyncio.gather(*(each.kickoff_async() for each in crews))

        return program


def _crew(agent: Agent, llm: LLM, question: str) -> Crew:
    tools = [
        *(FunctionTool(TOOLS[name]) for name in agent.tools),
        *(_consulting(each, llm) for each in agent.experts),
    ]
    # Its system prompt begins with "You are ROLE.".
    return crew_of(task_of(agent_of(llm, agent.name, tuple(tools)), question))


def _consulting(expert: Agent, llm: LLM) -> BaseTool:
    def ask(task: str) -> str:
        return str(_crew(expert, llm, task).kickoff())

    ask.__name__, ask.__doc__ = expert.name, f"Ask the {expert.name}."
    return FunctionTool(ask)


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
