"""An ordinary LangChain agent that solves word problems with a calculator. It knows nothing of agl."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from calculator import SYSTEM_PROMPT, calculator
from langchain.agents import create_agent
from langchain.agents.middleware import ToolCallRequest, wrap_tool_call
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.types import Command

MOST_GRAPH_STEPS = 9
"""The model and its tool take a step each: this agent gives up when its fifth reply asks for a tool again."""


@wrap_tool_call
async def tell_the_model(
    request: ToolCallRequest, run: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
) -> ToolMessage | Command[Any]:
    """A tool that fails is something to tell the model, not the end of the agent."""
    try:
        return await run(request)
    except ValueError as error:
        return ToolMessage(f"Error: {error}", tool_call_id=request.tool_call["id"], status="error")


agent = create_agent(
    ChatOpenAI(model="default"), [calculator], system_prompt=SYSTEM_PROMPT, middleware=[tell_the_model], name="solver"
)


async def solve(task_input: dict[str, str]) -> str:
    """Answer `{"question": …}`."""
    question = {"role": "user", "content": task_input["question"]}
    try:
        state = await agent.ainvoke({"messages": [question]}, {"recursion_limit": MOST_GRAPH_STEPS})
    except GraphRecursionError:
        return "I did not find the answer."
    return str(state["messages"][-1].text)
