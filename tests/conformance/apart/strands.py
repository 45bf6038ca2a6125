"""Strands' agents, which consult each other in tools."""

import asyncio
from collections.abc import Callable
from typing import Any

from strands import Agent, tool
from strands.hooks import BeforeModelCallEvent
from strands.models.openai import OpenAIModel

from .. import driver as scenarios
from ..driver import Program, Question, Setting
from ..scenarios import TOOLS
from . import Strands

DRIVER = Strands


def program(scenario: scenarios.Scenario, setting: Setting) -> Program:
    """Agents are made for each question."""
    if scenario.react or any(agent.handoffs for agent in scenario.everyone()):
        raise NotImplementedError

    async def run(question: Question) -> None:
        agents = [_agent(agent, scenario, setting) for agent in scenario.asked]
        await asyncio.gather(*(agent.invoke_async(question.text) for agent in agents))

    return run


def _agent(agent: scenarios.Agent, scenario: scenarios.Scenario, setting: Setting) -> Agent:
    def forget(event: BeforeModelCallEvent) -> None:
        if agent.keeps:
            del event.agent.messages[1 : -agent.keeps]

    return Agent(
        name=agent.name,
        model=_model(agent, scenario, setting),
        system_prompt=agent.prompt,
        tools=[
            *(tool(TOOLS[name]) for name in agent.tools),
            *(_consulting(expert, scenario, setting) for expert in agent.experts),
        ],
        hooks=[forget],
        callback_handler=None,
    )


def _model(agent: scenarios.Agent, scenario: scenarios.Scenario, setting: Setting) -> OpenAIModel:
    params = {**scenario.sampling, **agent.response_format}
    client = {"base_url": setting.base_url, "api_key": setting.api_key, "max_retries": setting.retries}
    return OpenAIModel(client_args=client, model_id="default", params=params, stream=setting.streaming)


def _consulting(expert: scenarios.Agent, scenario: scenarios.Scenario, setting: Setting) -> Callable[..., Any]:
    agent = _agent(expert, scenario, setting)

    @tool(name=expert.name, description=f"Ask the {expert.name}.")
    async def consult(task: str) -> str:
        return str(await agent.invoke_async(task))

    return consult
