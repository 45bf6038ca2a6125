"""Haystack's Agent, in pipelines and as a tool."""

from __future__ import annotations

from typing import Any

from haystack import Pipeline
from haystack.components.agents import Agent as HaystackAgent
from haystack.components.agents.state import State, replace_values
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.hooks import hook
from haystack.tools import Tool, create_tool_from_function
from haystack.utils import Secret

from .. import scenarios
from ..driver import CHAT, RESPONSES, Agent
from ..scenarios import TOOLS
from . import Haystack

DRIVER = Haystack

TASK = {"type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]}


class Cast(scenarios.Cast):
    """An agent is in a pipeline that names it."""

    def agent(self, agent: Agent) -> Any:
        if self.scenario.choices > 1 and self.setting.api == RESPONSES:
            raise NotImplementedError
        return _Team(self, agent)

    async def ask(self, agent: Any, task: str) -> None:
        await agent.ask(task)

    def member(self, agent: Agent) -> HaystackAgent:
        handoffs = [create_tool_from_function(_transfer, f"transfer_to_{other.name}") for other in agent.handoffs]
        return HaystackAgent(
            chat_generator=self.generator(agent),
            system_prompt=agent.prompt,
            tools=[
                *(create_tool_from_function(TOOLS[name]) for name in agent.tools),
                *map(self._consulting, agent.experts),
                *handoffs,
            ],
            exit_conditions=["text", *(tool.name for tool in handoffs)],
            hooks={"before_llm": [_keeping(agent.keeps)]} if agent.keeps else None,
        )

    def generator(self, agent: Agent, **options: Any) -> Any:
        async def seen(_: Any) -> None: ...

        setting = self.setting
        if agent.answers:
            form = {"name": "answer", "schema": {**agent.schema, "additionalProperties": False}, "strict": True}
            if setting.api == CHAT:
                options["response_format"] = {"type": "json_schema", "json_schema": form}
            else:
                options["text"] = {"format": {"type": "json_schema", **form}}
        kind = OpenAIChatGenerator if setting.api == CHAT else OpenAIResponsesChatGenerator
        return kind(
            api_key=Secret.from_token(setting.api_key),
            model="default",
            api_base_url=setting.base_url,
            max_retries=setting.retries,
            streaming_callback=seen if setting.streaming else None,
            generation_kwargs=options,
            tools_strict=agent.answers is not None,
        )

    def _consulting(self, expert: Agent) -> Tool:
        agent = self.member(expert)

        async def consult(task: str) -> str:
            out = await agent.run_async([ChatMessage.from_user(task)])
            return str(out["last_message"].text)

        return Tool(name=expert.name, description=f"Ask the {expert.name}.", parameters=TASK, async_function=consult)


class _Team:
    """An agent in a pipeline, and the one that it hands over to."""

    def __init__(self, cast: Cast, agent: Agent) -> None:
        self._name, self._pipeline = agent.name, Pipeline()
        self._before: list[ChatMessage] = []
        if cast.scenario.choices > 1:
            self._pipeline.add_component(agent.name, cast.generator(agent, **cast.scenario.sampling))
            self._before = [ChatMessage.from_system(agent.prompt)]
        else:
            self._pipeline.add_component(agent.name, cast.member(agent))
        self._others = {f"transfer_to_{other.name}": _Team(cast, other) for other in agent.handoffs}

    async def ask(self, question: str) -> None:
        await self._go_on([*self._before, ChatMessage.from_user(question)])

    async def _go_on(self, messages: list[ChatMessage]) -> None:
        out = await self._pipeline.run_async({self._name: {"messages": messages}})
        spoken = out[self._name].get("messages") or ()
        for result in spoken[-1].tool_call_results if spoken else ():
            # The agent has stopped at this tool, which is one of its exit conditions.
            conversation = [message for message in spoken if not message.is_from("system")]
            await self._others[result.origin.tool_name]._go_on(conversation)


def _transfer() -> str:
    """Hand over."""
    return "Transferred."


def _keeping(count: int) -> Any:
    @hook
    def keep(state: State) -> None:
        system, question, *later = state.get("messages")
        state.set("messages", [system, question, *later[-count:]], handler_override=replace_values)

    return keep
