"""AutoGen's AssistantAgent, teams, agents as tools, and agents of one's own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.conditions import TextMentionTermination, TextMessageTermination
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat, Swarm
from autogen_agentchat.tools import AgentTool
from autogen_core import CancellationToken
from autogen_core.model_context import BufferedChatCompletionContext
from autogen_core.models import AssistantMessage, ChatCompletionClient, ModelInfo, SystemMessage, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

from ..driver import CHAT, Agent, Driver, Program, Question, Scenario, Setting
from ..scenarios import TOOLS, action

_MODEL = ModelInfo(vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True)


class AutoGen(Driver):
    """Agents are `AssistantAgent`s, handoffs a `Swarm`. A subclass of `BaseChatAgent` does what these cannot.

    AutoGen's agents keep their conversation: rollouts share the model client, and each has agents of its own.
    """

    name = "AutoGen (agl-autogen)"
    apis = (CHAT,)

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        client = OpenAIChatCompletionClient(
            model="default",
            base_url=setting.base_url,
            api_key=setting.api_key,
            model_info=_MODEL,
            max_retries=setting.retries,
            extra_body=scenario.sampling,
        )

        async def program(question: Question) -> None:
            first = scenario.agents[0]
            if scenario.react:
                loop = RoundRobinGroupChat(
                    [_Thinker(first, client, setting)], termination_condition=TextMentionTermination("Answer:")
                )
                await loop.run(task=question.text)
            elif first.handoffs:
                *_, last = team = [_assistant(agent, client, setting) for agent in scenario.everyone()]
                ending = TextMessageTermination(source=last.name)
                await _cancellable(Swarm(team, termination_condition=ending), question.text)
            else:
                await asyncio.gather(
                    *(_assistant(member, client, setting).run(task=question.text) for member in scenario.asked)
                )

        return program


async def _cancellable(team: Swarm, task: str) -> None:
    """A team that is only cancelled as a coroutine waits for its calls: AutoGen stops them by a token."""
    token = CancellationToken()
    run = asyncio.create_task(team.run(task=task, cancellation_token=token))
    try:
        await asyncio.shield(run)
    except asyncio.CancelledError:
        token.cancel()
        await asyncio.wait([run])
        raise


def _assistant(agent: Agent, client: ChatCompletionClient, setting: Setting) -> AssistantAgent:
    return AssistantAgent(
        agent.name,
        client,
        tools=[
            # AutoGen parses structured output only beside tools that are strict.
            *(FunctionTool(TOOLS[name], name, strict=agent.answers is not None) for name in agent.tools),
            *(AgentTool(_assistant(expert, client, setting)) for expert in agent.experts),
        ],
        handoffs=[other.name for other in agent.handoffs],
        system_message=agent.prompt,
        description=f"The {agent.name}.",
        model_client_stream=setting.streaming,
        max_tool_iterations=20,
        output_content_type=agent.answers,
        model_context=BufferedChatCompletionContext(agent.keeps) if agent.keeps else None,
    )


class _Thinker(BaseChatAgent):
    """Text ReAct by an agent of one's own: each of its turns is one call, and the tool that the text asks for."""

    def __init__(self, agent: Agent, client: ChatCompletionClient, setting: Setting) -> None:
        super().__init__(agent.name, f"The {agent.name}.")
        self._client, self._streaming = client, setting.streaming
        self._messages: list[Any] = [SystemMessage(content=agent.prompt)]
        self._tools = {name: FunctionTool(TOOLS[name], name) for name in agent.tools}

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        return (TextMessage,)

    async def on_reset(self, cancellation_token: CancellationToken) -> None: ...

    async def on_messages(self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken) -> Response:
        self._messages += [UserMessage(content=message.to_text(), source=message.source) for message in messages]
        if self._streaming:
            *_, result = [item async for item in self._client.create_stream(self._messages)]
        else:
            result = await self._client.create(self._messages)
        reply = str(result.content)
        self._messages.append(AssistantMessage(content=reply, source=self.name))
        step = action(reply)
        if step is not None:
            name, topic = step
            observed = await self._tools[name].run_json({"topic": topic}, cancellation_token)
            self._messages.append(UserMessage(content=f"Observation: {observed}", source="tool"))
        return Response(chat_message=TextMessage(content=reply, source=self.name))
