"""The OpenAI Agents SDK."""

from __future__ import annotations

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

from .. import scenarios
from ..driver import ATTACH, CHAT, RESPONSES, Agent, Driver, Gap, Program, Scenario, Setting
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
        return Cast(scenario, setting).program()


class Cast(scenarios.Cast):
    """An expert is an agent as a tool of the SDK's."""

    def agent(self, agent: Agent) -> SdkAgent[Any]:
        setting = self.setting
        client = openai.AsyncOpenAI(base_url=setting.base_url, api_key=setting.api_key, max_retries=setting.retries)
        return SdkAgent(
            name=agent.name,
            instructions=agent.prompt,
            model=(OpenAIChatCompletionsModel if setting.api == CHAT else OpenAIResponsesModel)("default", client),
            model_settings=ModelSettings(extra_args=self.scenario.sampling),
            tools=[
                *(agents.function_tool(TOOLS[name]) for name in agent.tools),
                *map(self._consulting, agent.experts),
            ],
            handoffs=[self.agent(other) for other in agent.handoffs],
            output_type=agent.answers,
        )

    async def ask(self, agent: SdkAgent[Any], task: str) -> None:
        keeps = self.scenario.agents[0].keeps
        config = RunConfig(call_model_input_filter=_keeping(keeps) if keeps else None)
        options: Any = {"run_config": config, "max_turns": 20}
        if not self.setting.streaming:
            await Runner.run(agent, task, **options)
            return
        async for _ in Runner.run_streamed(agent, task, **options).stream_events():
            pass

    def _consulting(self, expert: Agent) -> Any:
        async def seen(_: Any) -> None: ...

        return self.agent(expert).as_tool(
            expert.name, f"Ask the {expert.name}.", parameters=Task, on_stream=seen if self.setting.streaming else None
        )


def _keeping(count: int) -> Any:
    def keep(data: CallModelData[Any]) -> ModelInputData:
        question, *later = data.model_data.input
        return ModelInputData([question, *later[-count:]], data.model_data.instructions)

    return keep
