"""An ordinary agent of the OpenAI Agents SDK that answers questions by searching. It knows nothing of agl."""

from __future__ import annotations

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, Runner
from openai import AsyncOpenAI
from search_tool import INSTRUCTIONS, search

MOST_REPLIES = 6
"""Replies of the model before the agent gives up: four hops take five."""

researcher = Agent(
    name="researcher",
    instructions=INSTRUCTIONS,
    model=OpenAIChatCompletionsModel("default", AsyncOpenAI()),
    tools=[search],
)


async def answer(task_input: dict[str, str]) -> str:
    """Answer `{"question": …}`."""
    try:
        result = await Runner.run(researcher, task_input["question"], max_turns=MOST_REPLIES)
    except MaxTurnsExceeded:
        return "I did not find the answer."
    return str(result.final_output)
