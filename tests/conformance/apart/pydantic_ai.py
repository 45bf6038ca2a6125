"""pydantic-ai's agents, which consult each other in tools and hand over in output functions."""

import functools
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pydantic_ai
from pydantic_ai import ModelRetry, NativeOutput, RunContext, ToolOutput
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from .. import scenarios
from ..driver import CHAT, Agent
from . import PydanticAI

DRIVER = PydanticAI


class Cast(scenarios.Cast):
    """Agents stream to a handler of events."""

    def agent(self, agent: Agent) -> pydantic_ai.Agent:
        def forget(messages: list[Any]) -> list[Any]:
            return [messages[0], *messages[1:][-agent.keeps :]] if agent.keeps else messages

        handoffs = [self._handing_over(other) for other in agent.handoffs]
        return pydantic_ai.Agent(
            self._model(),
            name=agent.name,
            instructions=agent.prompt,
            tools=self.tools(agent, _failing_softly),
            output_type=NativeOutput(agent.answers) if agent.answers else [str, *handoffs],
            retries=3,
            capabilities=[ProcessHistory(forget)],
        )

    async def ask(self, agent: pydantic_ai.Agent, task: str | None, **options: Any) -> Any:
        async def hear(_: Any, events: AsyncIterator[Any]) -> None:
            async for _ in events:
                pass

        heard = {"event_stream_handler": hear} if self.setting.streaming else {}
        return (await agent.run(task, **heard, **options)).output

    def _model(self) -> Any:
        setting = self.setting
        client = openai.AsyncOpenAI(base_url=setting.base_url, api_key=setting.api_key, max_retries=setting.retries)
        kind = OpenAIChatModel if setting.api == CHAT else OpenAIResponsesModel
        provider = OpenAIProvider(openai_client=client)
        return kind("default", provider=provider, settings={"extra_body": self.scenario.sampling})

    def _handing_over(self, other: Agent) -> ToolOutput[Any]:
        agent = self.agent(other)

        async def transfer(context: RunContext[Any]) -> str:
            return str(await self.ask(agent, None, message_history=context.messages[:-1]))

        return ToolOutput(transfer, name=f"transfer_to_{other.name}")


def _failing_softly(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Any other exception ends the agent's run; experts do not fail."""
    if inspect.iscoroutinefunction(tool):
        return tool

    @functools.wraps(tool)
    def run(**arguments: Any) -> Any:
        try:
            return tool(**arguments)
        except Exception as error:
            raise ModelRetry(str(error)) from error

    return run
