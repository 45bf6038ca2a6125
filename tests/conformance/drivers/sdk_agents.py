"""The OpenAI Agents SDK."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import agents
import openai
from agents import Agent as SdkAgent
from agents import ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner
from agents.run import CallModelData, ModelInputData
from agents.tracing import set_trace_processors
from agents.tracing.processors import default_processor

from agl_openai_agents import AglProcessor

from ..driver import ATTACH, CHAT, MESSAGES, RESPONSES, Agent, Driver, Gap, Program, Question, Scenario, Setting
from ..scenarios import TOOLS

PROCESSOR = "AglProcessor()"


@dataclasses.dataclass
class Task:
    """The question to an agent that is a tool."""

    task: str


class OpenAIAgents(Driver):
    """Agents, handoffs and agents as tools are the SDK's own."""

    name = "OpenAI Agents SDK (agl-openai-agents)"
    apis = (CHAT, RESPONSES)
    without = {MESSAGES: "The SDK's own models speak the APIs of OpenAI."}  # noqa: RUF012
    forms = (ATTACH, PROCESSOR)
    gaps = (
        Gap("three choices (n)", "The Responses API has no `n`.", apis=(RESPONSES,)),
        Gap("text ReAct", "The SDK runs tools only for the tool calls of a model: it has no text ReAct."),
    )

    @contextlib.contextmanager
    def attached(self, form: str) -> Iterator[None]:
        with super().attached(form):
            # Nothing may be sent to the SDK's vendor.
            set_trace_processors([])
            try:
                yield
            finally:
                set_trace_processors([default_processor()])

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        if setting.form == PROCESSOR:
            agents.add_trace_processor(AglProcessor())
        members = [_agent(agent, setting, scenario) for agent in scenario.asked]
        keeps = scenario.agents[0].keeps
        config = RunConfig(call_model_input_filter=_keeping(keeps)) if keeps else RunConfig()

        async def program(question: Question) -> None:
            await asyncio.gather(*(_run(member, question.text, setting, config) for member in members))

        return program


async def _run(agent: SdkAgent[Any], question: str, setting: Setting, config: RunConfig) -> None:
    if not setting.streaming:
        await Runner.run(agent, question, run_config=config, max_turns=20)
        return
    async for _ in Runner.run_streamed(agent, question, run_config=config, max_turns=20).stream_events():
        pass


def _agent(agent: Agent, setting: Setting, scenario: Scenario) -> SdkAgent[Any]:
    client = openai.AsyncOpenAI(base_url=setting.base_url, api_key=setting.api_key, max_retries=setting.retries)
    model = (OpenAIChatCompletionsModel if setting.api == CHAT else OpenAIResponsesModel)("default", client)
    return SdkAgent(
        name=agent.name,
        instructions=agent.prompt,
        model=model,
        model_settings=ModelSettings(extra_args=scenario.sampling),
        tools=[
            *(agents.function_tool(TOOLS[name]) for name in agent.tools),
            *(_consulting(expert, setting, scenario) for expert in agent.experts),
        ],
        handoffs=[_agent(other, setting, scenario) for other in agent.handoffs],
        output_type=agent.answers,
    )


def _consulting(expert: Agent, setting: Setting, scenario: Scenario) -> Any:
    async def seen(_: Any) -> None: ...

    return _agent(expert, setting, scenario).as_tool(
        expert.name, f"Ask the {expert.name}.", parameters=Task, on_stream=seen if setting.streaming else None
    )


def _keeping(count: int) -> Any:
    def keep(data: CallModelData[Any]) -> ModelInputData:
        question, *later = data.model_data.input
        return ModelInputData([question, *later[-count:]], data.model_data.instructions)

    return keep
