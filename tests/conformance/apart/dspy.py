"""DSPy modules that talk, run tools and ask each other."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import dspy

from ..driver import Agent, InexpressibleError, Program, Question, Scenario, Setting
from ..scenarios import TOOLS, action
from . import DSPy

DRIVER = DSPy


def program(scenario: Scenario, setting: Setting) -> Program:
    """The scenario's program, made once."""
    if any(each.handoffs for each in scenario.everyone()):
        raise InexpressibleError
    lm = dspy.LM(
        "openai/default",
        api_base=setting.base_url,
        api_key=setting.api_key,
        num_retries=setting.retries,
        n=scenario.choices,
    )
    made = [_Team(agent) for agent in scenario.agents for _ in range(scenario.samples)]

    async def run(question: Question) -> None:
        with dspy.context(lm=lm, adapter=_AsItIs()):
            await asyncio.gather(*(each.acall(task=question.text) for each in made))

    return run


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
            each.name: dspy.Tool(_Team(each).ask, name=each.name) for each in agent.experts
        }

    async def ask(self, task: str) -> str:
        """Ask it."""
        return str((await self.acall(task=task)).answer)

    async def aforward(self, task: str) -> Any:
        agent = self.agent
        said: list[dict[str, Any]] = []
        options: dict[str, Any] = {}
        if agent.answers:
            schema = {"name": "answer", "schema": agent.answers.model_json_schema()}
            options["config"] = {"response_format": {"type": "json_schema", "json_schema": schema}}
        if self.tools:
            options["tools"] = list(self.tools.values())
        while True:
            kept = said[-agent.keeps :] if agent.keeps else said
            before = [{"role": "system", "content": agent.prompt}, {"role": "user", "content": task}]
            found = await getattr(self, agent.name).acall(conversation=[*before, *kept], **options)
            calls = found.calls.tool_calls if self.tools and found.calls else []
            asked = action(found.answer) if self.tools and not calls else None
            if asked:
                name, topic = asked
                said += [
                    {"role": "assistant", "content": found.answer},
                    {"role": "user", "content": f"Observation: {await _run(self.tools[name], {'topic': topic})}"},
                ]
            elif calls:
                results = await asyncio.gather(*(_run(self.tools[each.name], each.args) for each in calls))
                requested = [
                    {
                        "id": each.id,
                        "type": "function",
                        "function": {"name": each.name, "arguments": json.dumps(each.args)},
                    }
                    for each in calls
                ]
                said += [
                    {"role": "assistant", "content": None, "tool_calls": requested},
                    *(
                        {"role": "tool", "tool_call_id": each.id, "content": str(result)}
                        for each, result in zip(calls, results, strict=True)
                    ),
                ]
            else:
                return found


async def _run(tool: Any, arguments: dict[str, Any]) -> Any:
    try:
        return await tool.acall(**arguments)
    except Exception as error:
        return f"Error: {error}"
