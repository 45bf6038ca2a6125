"""Google ADK's LlmAgents, with LiteLLM's models."""

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

from .. import scenarios
from ..driver import Agent
from ..scenarios import TOOLS
from . import GoogleADK

DRIVER = GoogleADK


class Task(BaseModel):
    """The question to an expert."""

    task: str


class Cast(scenarios.Cast):
    """Experts are sub-agents; each question has a session of its own."""

    def agent(self, agent: Agent) -> InMemoryRunner:
        return InMemoryRunner(self._member(agent), app_name="app")

    async def ask(self, agent: InMemoryRunner, task: str) -> None:
        session = await agent.session_service.create_session(app_name="app", user_id="user")
        config = RunConfig(streaming_mode=StreamingMode.SSE if self.setting.streaming else StreamingMode.NONE)
        question = types.Content(role="user", parts=[types.Part(text=task)])
        async for _ in agent.run_async(user_id="user", session_id=session.id, new_message=question, run_config=config):
            pass

    def _member(self, agent: Agent, **options: Any) -> LlmAgent:
        def forget(callback_context: Any, llm_request: Any) -> None:
            if agent.keeps:
                del llm_request.contents[1 : -agent.keeps]

        return LlmAgent(
            name=agent.name,
            description=f"The {agent.name}.",
            model=self._model(agent),
            instruction=agent.prompt,
            tools=[
                *(_failing_softly(TOOLS[name]) for name in agent.tools),
                *(_handing_over(other.name) for other in agent.handoffs),
            ],
            sub_agents=[
                *(self._member(expert, mode="single_turn", input_schema=Task) for expert in agent.experts),
                *(self._member(other) for other in agent.handoffs),
            ],
            before_model_callback=forget,
            **options,
        )

    def _model(self, agent: Agent) -> LiteLlm:
        form = {"response_format": agent.answers} if agent.answers else {}
        return LiteLlm(
            model="openai/default",
            api_base=self.setting.base_url,
            api_key=self.setting.api_key,
            max_retries=self.setting.retries,
            **self.scenario.sampling,
            **form,
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
