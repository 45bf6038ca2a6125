"""smolagents' ToolCallingAgents, with managed agents."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from smolagents import LogLevel, OpenAIServerModel, Tool, ToolCallingAgent
from smolagents.models import ChatMessage

from ..driver import Agent, Program, Question, Scenario, Setting
from ..scenarios import TOOLS, action
from . import Smolagents

DRIVER = Smolagents


def program(scenario: Scenario, setting: Setting) -> Program:
    """The scenario's models, made once; the agents are made for each question."""
    if any(agent.handoffs for agent in scenario.everyone()):
        raise NotImplementedError
    models = {agent.name: _model(agent, scenario, setting) for agent in scenario.everyone()}

    async def run(question: Question) -> None:
        agents = [_agent(agent, models, setting) for agent in scenario.asked]
        await asyncio.gather(*(asyncio.to_thread(_run, agent, question.text, setting) for agent in agents))

    return run


class _PlainModel(OpenAIServerModel):
    """Plain text asks for a tool in the words of ReAct, or is the answer."""

    def parse_tool_calls(self, message: ChatMessage) -> ChatMessage:
        if not message.tool_calls:
            step = action(str(message.content))
            name, given = (step[0], {"topic": step[1]}) if step else ("final_answer", {"answer": message.content})
            call = {"id": str(uuid.uuid4()), "type": "function", "function": {"name": name, "arguments": given}}
            message.tool_calls = ChatMessage.from_dict({"role": "assistant", "tool_calls": [call]}).tool_calls
        return message


def _model(agent: Agent, scenario: Scenario, setting: Setting) -> OpenAIServerModel:
    options: dict[str, Any] = {**scenario.sampling, **agent.response_format}
    retries = {"max_retries": setting.retries}
    return _PlainModel("default", setting.base_url, setting.api_key, client_kwargs=retries, **options)


def _agent(agent: Agent, models: dict[str, OpenAIServerModel], setting: Setting) -> ToolCallingAgent:
    def is_valid(answer: Any, *_: Any, **__: Any) -> bool:
        return agent.answers is None or bool(agent.answers.model_validate_json(answer))

    def forget(_: Any, agent: Any) -> None:
        del agent.memory.steps[1:]

    built = ToolCallingAgent(
        tools=[FunctionTool(TOOLS[name]) for name in agent.tools],
        model=models[agent.name],
        name=agent.name,
        description=f"The {agent.name}.",
        instructions=agent.prompt,
        managed_agents=[_agent(expert, models, setting) for expert in agent.experts],
        final_answer_checks=[is_valid],
        # What the question is followed by is one step of two messages: the tool calls, and what they gave.
        step_callbacks=[forget] if agent.keeps else [],
        stream_outputs=setting.streaming,
        verbosity_level=LogLevel.OFF,
    )
    for expert in built.managed_agents.values():
        # Before smolagents 1.26 a call without it was refused.
        expert.inputs["additional_args"]["nullable"] = True
    return built


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


def _run(agent: ToolCallingAgent, question: str, setting: Setting) -> None:
    if setting.streaming:
        for _ in agent.run(question, stream=True):
            pass
    else:
        agent.run(question)
