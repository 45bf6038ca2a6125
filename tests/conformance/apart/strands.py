"""Strands' agents, which consult each other in tools."""

from typing import Any

import strands
from strands.hooks import BeforeModelCallEvent
from strands.models.openai import OpenAIModel

from .. import scenarios
from ..driver import Agent
from . import Strands

DRIVER = Strands


class Cast(scenarios.Cast):
    """Agents, and models, are made for each question."""

    remembers = True

    def agent(self, agent: Agent) -> strands.Agent:
        def forget(event: BeforeModelCallEvent) -> None:
            if agent.keeps:
                del event.agent.messages[1 : -agent.keeps]

        setting = self.setting
        client = {"base_url": setting.base_url, "api_key": setting.api_key, "max_retries": setting.retries}
        params = {**self.scenario.sampling, **agent.response_format}
        return strands.Agent(
            name=agent.name,
            model=OpenAIModel(client_args=client, model_id="default", params=params, stream=setting.streaming),
            system_prompt=agent.prompt,
            tools=self.tools(agent, strands.tool),
            hooks=[forget],
            callback_handler=None,
        )

    async def ask(self, agent: strands.Agent, task: str) -> Any:
        return await agent.invoke_async(task)
