"""LlamaIndex's FunctionAgent, ReActAgent and AgentWorkflow."""

from typing import Any

from llama_index.core.agent.react.output_parser import ReActOutputParser
from llama_index.core.agent.react.types import ActionReasoningStep, BaseReasoningStep, ResponseReasoningStep
from llama_index.core.agent.workflow import AgentWorkflow, BaseWorkflowAgent, FunctionAgent, ReActAgent
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses

from .. import scenarios
from ..driver import CHAT, Agent
from ..scenarios import action
from . import LlamaIndex

DRIVER = LlamaIndex


class Cast(scenarios.Cast):
    """An agent that hands over is a workflow of several."""

    def agent(self, agent: Agent) -> Any:
        if agent.answers:
            raise NotImplementedError
        if not agent.handoffs:
            return self._member(agent)
        return AgentWorkflow([self._member(member) for member in agent.everyone()], root_agent=agent.name)

    async def ask(self, agent: Any, task: str) -> Any:
        return await agent.run(task, max_iterations=30)

    def _member(self, agent: Agent) -> BaseWorkflowAgent:
        options: dict[str, Any] = {
            "name": agent.name,
            "description": f"The {agent.name}.",
            "system_prompt": agent.prompt,
            "llm": self._model(),
            "streaming": self.setting.streaming,
            "tools": [
                *self.tools(agent, FunctionTool.from_defaults),
                *(_handing_over(other.name) for other in agent.handoffs),
            ],
        }
        if self.scenario.react:
            return ReActAgent(output_parser=_Actions(), **options)
        # Each handoff is a tool of its own in the scenarios.
        return _Keeping(keeps=agent.keeps, can_handoff_to=[], **options)

    def _model(self) -> Any:
        setting = self.setting
        kind = OpenAILike if setting.api == CHAT else OpenAILikeResponses
        only_chat: dict[str, Any] = {"is_chat_model": True} if setting.api == CHAT else {}
        return kind(
            model="default",
            api_base=setting.base_url,
            api_key=setting.api_key,
            max_retries=setting.retries,
            is_function_calling_model=True,
            additional_kwargs=self.scenario.sampling,
            **only_chat,
        )


def _handing_over(name: str) -> FunctionTool:
    async def transfer(ctx: Context) -> str:
        await ctx.store.set("next_agent", name)
        return f"{name} goes on."

    return FunctionTool.from_defaults(
        async_fn=transfer, name=f"transfer_to_{name}", description=f"Hand over to {name}."
    )


class _Keeping(FunctionAgent):
    """Forgets all but the last messages of its run."""

    keeps: int | None = None

    async def take_step(self, ctx: Any, llm_input: Any, tools: Any, memory: Any) -> Any:
        if self.keeps:
            messages = await ctx.store.get(self.scratchpad_key, default=[])
            await ctx.store.set(self.scratchpad_key, messages[-self.keeps :])
        return await super().take_step(ctx, llm_input, tools, memory)


class _Actions(ReActOutputParser):
    """Reads the scenarios' form of an action."""

    def parse(self, output: str, is_streaming: bool = False) -> BaseReasoningStep:
        step = action(output)
        if step is None:
            return ResponseReasoningStep(thought="", response=output, is_streaming=is_streaming)
        tool, topic = step
        return ActionReasoningStep(thought="", action=tool, action_input={"topic": topic})
