"""smolagents' ToolCallingAgents, with managed agents."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from smolagents import LogLevel, OpenAIServerModel, Tool, ToolCallingAgent
from smolagents.models import ChatMessage

from .. import scenarios
from ..driver import Agent, Scenario, Setting
from ..scenarios import TOOLS, action
from . import Smolagents

DRIVER = Smolagents


class Cast(scenarios.Cast):
    """Models are made once; the agents, which block, are made for each question."""

    remembers = True

    def __init__(self, scenario: Scenario, setting: Setting) -> None:
        super().__init__(scenario, setting)
        self._models = {agent.name: self._model(agent) for agent in scenario.everyone()}

    def _model(self, agent: Agent) -> OpenAIServerModel:
        options: dict[str, Any] = {**self.scenario.sampling, **agent.response_format}
        retries = {"max_retries": self.setting.retries}
        return _PlainModel("default", self.setting.base_url, self.setting.api_key, client_kwargs=retries, **options)

    def agent(self, agent: Agent) -> ToolCallingAgent:
        def is_valid(answer: Any, *_: Any, **__: Any) -> bool:
            return agent.answers is None or bool(agent.answers.model_validate_json(answer))

        def forget(_: Any, agent: Any) -> None:
            del agent.memory.steps[1:]

        built = ToolCallingAgent(
            tools=[FunctionTool(TOOLS[name]) for name in agent.tools],
            model=self._models[agent.name],
            name=agent.name,
            description=f"The {agent.name}.",
            instructions=agent.prompt,
            managed_agents=[self.agent(expert) for expert in agent.experts],
            final_answer_checks=[is_valid],
            # One step of two messages follows the question: the tool calls, and their results.
            step_callbacks=[forget] if agent.keeps else [],
            stream_outputs=self.setting.streaming,
            verbosity_level=LogLevel.OFF,
        )
        for expert in built.managed_agents.values():
            # Before smolagents 1.26 a call without it was refused.
            expert.inputs["additional_args"]["nullable"] = True
        return built

    async def ask(self, agent: ToolCallingAgent, task: str) -> Any:
        return await asyncio.to_thread(
            lambda: [*agent.run(task, stream=True)] if self.setting.streaming else agent.run(task)
        )


class _PlainModel(OpenAIServerModel):
    """Plain text asks for a tool in the words of ReAct, or is the answer."""

    def parse_tool_calls(self, message: ChatMessage) -> ChatMessage:
        if not message.tool_calls:
            step = action(str(message.content))
            name, given = (step[0], {"topic": step[1]}) if step else ("final_answer", {"answer": message.content})
            call = {"id": str(uuid.uuid4()), "type": "function", "function": {"name": name, "arguments": given}}
            message.tool_calls = ChatMessage.from_dict({"role": "assistant", "tool_calls": [call]}).tool_calls
        return message


class FunctionTool(Tool):  # type: ignore[misc]
    """A function without the descriptions of its arguments that smolagents' own `tool` asks for."""

    skip_forward_signature_validation = True
    output_type = "any"

    def __init__(self, function: Callable[..., Any]) -> None:
        kinds = [(name, kind) for name, kind in function.__annotations__.items() if name != "return"]
        types = {"int": "integer", "str": "string", int: "integer", str: "string"}
        self.name, self.description = function.__name__, function.__doc__ or ""
        self.inputs = {name: {"type": types[kind], "description": name} for name, kind in kinds}
        super().__init__()
        self.forward = function
