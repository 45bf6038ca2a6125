"""pydantic-ai's agents, which consult each other in tools and hand over in output functions."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
from pydantic_ai import Agent, ModelRetry, NativeOutput, RunContext, ToolOutput
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from .. import driver as scenarios
from ..driver import CHAT, Program, Question, Setting
from ..scenarios import TOOLS
from . import PydanticAI

DRIVER = PydanticAI


def program(scenario: scenarios.Scenario, setting: Setting) -> Program:
    """The scenario's agents, made once."""
    if scenario.react:
        raise NotImplementedError
    agents = [_agent(agent, scenario, setting) for agent in scenario.asked]

    async def run(question: Question) -> None:
        await asyncio.gather(*(_run(agent, question.text, setting) for agent in agents))

    return run


async def _run(agent: Agent, text: str | None, setting: Setting, **options: Any) -> Any:
    async def hear(_: Any, events: AsyncIterator[Any]) -> None:
        async for _ in events:
            pass

    heard = {"event_stream_handler": hear} if setting.streaming else {}
    return (await agent.run(text, **heard, **options)).output


def _agent(agent: scenarios.Agent, scenario: scenarios.Scenario, setting: Setting) -> Agent:
    def forget(messages: list[Any]) -> list[Any]:
        return [messages[0], *messages[1:][-agent.keeps :]] if agent.keeps else messages

    handoffs = [_handing_over(other, scenario, setting) for other in agent.handoffs]
    return Agent(
        _model(scenario, setting),
        name=agent.name,
        instructions=agent.prompt,
        tools=[
            *(_failing_softly(TOOLS[name]) for name in agent.tools),
            *(_consulting(expert, scenario, setting) for expert in agent.experts),
        ],
        output_type=NativeOutput(agent.answers) if agent.answers else [str, *handoffs],
        retries=3,
        capabilities=[ProcessHistory(forget)],
    )


def _model(scenario: scenarios.Scenario, setting: Setting) -> Any:
    client = openai.AsyncOpenAI(base_url=setting.base_url, api_key=setting.api_key, max_retries=setting.retries)
    kind = OpenAIChatModel if setting.api == CHAT else OpenAIResponsesModel
    return kind("default", provider=OpenAIProvider(openai_client=client), settings={"extra_body": scenario.sampling})


def _failing_softly(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Any other exception ends the agent's run."""

    @functools.wraps(tool)
    def run(**arguments: Any) -> Any:
        try:
            return tool(**arguments)
        except Exception as error:
            raise ModelRetry(str(error)) from error

    return run


def _consulting(expert: scenarios.Agent, scenario: scenarios.Scenario, setting: Setting) -> Callable[..., Any]:
    agent = _agent(expert, scenario, setting)

    async def consult(task: str) -> str:
        return str(await _run(agent, task, setting))

    consult.__name__ = expert.name
    return consult


def _handing_over(other: scenarios.Agent, scenario: scenarios.Scenario, setting: Setting) -> ToolOutput[Any]:
    agent = _agent(other, scenario, setting)

    async def transfer(context: RunContext[Any]) -> str:
        return str(await _run(agent, None, setting, message_history=context.messages[:-1]))

    return ToolOutput(transfer, name=f"transfer_to_{other.name}")
