"""Google ADK's LlmAgents, with LiteLLM's models."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.adk.tools import ToolContext
from google.genai import types
from pydantic import BaseModel

from .. import driver as scenarios
from ..driver import Program, Question, Setting
from ..scenarios import TOOLS
from . import GoogleADK

DRIVER = GoogleADK


class Task(BaseModel):
    """The question to an expert."""

    task: str


def program(scenario: scenarios.Scenario, setting: Setting) -> Program:
    """The scenario's agents, made once; each question has sessions of its own."""
    if scenario.react:
        raise NotImplementedError
    agents = [_agent(agent, scenario, setting) for agent in scenario.agents]
    runners = [InMemoryRunner(agent, app_name="app") for agent in agents] * scenario.samples

    async def run(question: Question) -> None:
        await asyncio.gather(*(_run(runner, question.text, setting) for runner in runners))

    return run


async def _run(runner: InMemoryRunner, text: str, setting: Setting) -> None:
    session = await runner.session_service.create_session(app_name="app", user_id="user")
    config = RunConfig(streaming_mode=StreamingMode.SSE if setting.streaming else StreamingMode.NONE)
    question = types.Content(role="user", parts=[types.Part(text=text)])
    async for _ in runner.run_async(user_id="user", session_id=session.id, new_message=question, run_config=config):
        pass


def _agent(agent: scenarios.Agent, scenario: scenarios.Scenario, setting: Setting, **options: Any) -> LlmAgent:
    def forget(callback_context: Any, llm_request: Any) -> None:
        if agent.keeps:
            del llm_request.contents[1 : -agent.keeps]

    return LlmAgent(
        name=agent.name,
        description=f"The {agent.name}.",
        model=_model(agent, scenario, setting),
        instruction=agent.prompt,
        tools=[
            *(_failing_softly(TOOLS[name]) for name in agent.tools),
            *(_handing_over(other.name) for other in agent.handoffs),
        ],
        sub_agents=[
            *(_agent(expert, scenario, setting, mode="single_turn", input_schema=Task) for expert in agent.experts),
            *(_agent(other, scenario, setting) for other in agent.handoffs),
        ],
        before_model_callback=forget,
        **options,
    )


def _model(agent: scenarios.Agent, scenario: scenarios.Scenario, setting: Setting) -> LiteLlm:
    options: dict[str, Any] = {**scenario.sampling}
    if agent.answers:
        options["response_format"] = agent.answers
    return LiteLlm(
        model="openai/default",
        api_base=setting.base_url,
        api_key=setting.api_key,
        max_retries=setting.retries,
        **options,
    )


def _failing_softly(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Any exception ends the agent's run: a tool that fails returns a dictionary that says so."""

    @functools.wraps(tool)
    def run(**arguments: Any) -> Any:
        try:
            return tool(**arguments)
        except Exception as error:
            return {"status": "error", "error_message": str(error)}

    return run


def _handing_over(name: str) -> Callable[..., Any]:
    def transfer(tool_context: ToolContext) -> str:
        tool_context.actions.transfer_to_agent = name
        return f"{name} goes on."

    transfer.__name__ = f"transfer_to_{name}"
    return transfer
