"""The agent of examples/calc with a tool that takes its time: log-normal, the same for the same rollout and call."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import anyio
from agent import MOST_GRAPH_STEPS, tell_the_model
from calculator import SYSTEM_PROMPT, calculator
from langchain.agents import create_agent
from langchain.agents.middleware import ToolCallRequest, wrap_tool_call
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.types import Command

from agl_core.worker import AgentContext

MEDIAN, TAIL = 1.0, 10.0
"""Seconds, and how many times as long the slowest hundredth takes at least."""
QUANTILE_99 = 2.3263
"""Of the standard normal distribution."""

latencies: ContextVar[Iterator[float]] = ContextVar("latencies")


@wrap_tool_call
async def take_time(
    request: ToolCallRequest, run: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
) -> ToolMessage | Command[Any]:
    await anyio.sleep(next(latencies.get()))
    return await run(request)


agent = create_agent(
    ChatOpenAI(model="default"),
    [calculator],
    system_prompt=SYSTEM_PROMPT,
    middleware=[take_time, tell_the_model],
    name="solver",
)


async def solve(task_input: dict[str, str], context: AgentContext) -> str:
    """Answer `{"question": …}`; evaluations do not wait."""
    chance = random.Random(context.rollout)
    median = MEDIAN if context.mode.trains else 0.0
    latencies.set(median * math.exp(math.log(TAIL) / QUANTILE_99 * chance.gauss(0, 1)) for _ in itertools.count())
    question = {"role": "user", "content": task_input["question"]}
    try:
        state = await agent.ainvoke({"messages": [question]}, {"recursion_limit": MOST_GRAPH_STEPS})
    except GraphRecursionError:
        return "I did not find the answer."
    return str(state["messages"][-1].text)
