"""DSPy modules that talk, run tools and ask each other."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

import dspy

from .. import scenarios
from ..driver import Agent
from ..scenarios import TOOLS, action
from . import DSPy

DRIVER = DSPy


class Cast(scenarios.Cast):
    """The scenario's program, made once; streaming, what comes is status messages, chunks, and the prediction last."""

    def agent(self, agent: Agent) -> _Team:
        if agent.handoffs:
            raise NotImplementedError
        return _Team(agent)

    async def ask(self, agent: _Team, task: str) -> None:
        with dspy.context(lm=self._lm, adapter=_AsItIs()):
            if not self.setting.streaming:
                await agent.acall(task=task)
                return
            async for value in dspy.streamify(agent, is_async_program=True)(task=task):
                last = value
            assert isinstance(last, dspy.Prediction)

    @functools.cached_property
    def _lm(self) -> dspy.LM:
        setting, choices = self.setting, self.scenario.choices
        options = {"api_base": setting.base_url, "api_key": setting.api_key, "num_retries": setting.retries}
        return dspy.LM("openai/default", **options, n=choices)


class _AsItIs(dspy.Adapter):  # type: ignore[misc]
    """Sends the conversation, and takes the reply, as they are."""

    def __init__(self) -> None:
        super().__init__(use_native_function_calling=True)

    def format(self, signature: Any, demos: Any, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        return list(inputs["conversation"])

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        return {"answer": completion}


class _Team(dspy.Module):  # type: ignore[misc]
    """One agent, under its own name, and those that it asks."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent
        fields = "conversation: list, tools: list[dspy.Tool] -> answer: str, calls: dspy.ToolCalls"
        setattr(
            self,
            agent.name,
            dspy.Predict(fields if agent.tools or agent.experts else "conversation: list -> answer: str"),
        )
        self.tools = {name: dspy.Tool(TOOLS[name]) for name in agent.tools} | {
            expert.name: dspy.Tool(_Team(expert).ask, name=expert.name) for expert in agent.experts
        }

    async def ask(self, task: str) -> str:
        """Ask it."""
        return str((await self.acall(task=task)).answer)

    async def aforward(self, task: str) -> Any:
        agent = self.agent
        conversation: list[dict[str, Any]] = []
        options: dict[str, Any] = {}
        if agent.answers:
            options["config"] = agent.response_format
        if self.tools:
            options["tools"] = list(self.tools.values())
        while True:
            kept = conversation[-agent.keeps :] if agent.keeps else conversation
            before = [{"role": "system", "content": agent.prompt}, {"role": "user", "content": task}]
            prediction = await getattr(self, agent.name).acall(conversation=[*before, *kept], **options)
            calls = prediction.calls.tool_calls if self.tools and prediction.calls else []
            step = action(prediction.answer) if self.tools and not calls else None
            if step:
                name, topic = step
                conversation += [
                    {"role": "assistant", "content": prediction.answer},
                    {"role": "user", "content": f"Observation: {await _run(self.tools[name], {'topic': topic})}"},
                ]
            elif calls:
                results = await asyncio.gather(*(_run(self.tools[call.name], call.args) for call in calls))
                requested = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": json.dumps(call.args)},
                    }
                    for call in calls
                ]
                conversation += [
                    {"role": "assistant", "content": None, "tool_calls": requested},
                    *(
                        {"role": "tool", "tool_call_id": call.id, "content": str(result)}
                        for call, result in zip(calls, results, strict=True)
                    ),
                ]
            else:
                return prediction


async def _run(tool: Any, arguments: dict[str, Any]) -> Any:
    try:
        return await tool.acall(**arguments)
    except Exception as error:
        return f"Error: {error}"
