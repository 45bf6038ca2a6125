"""An ordinary AutoGen agent that solves problems of several steps with a calculator. It knows nothing of agl."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pocket_calculator import SYSTEM_PROMPT, calculator

MOST_TOOL_TURNS = 5
"""The agent gives up when its fifth reply asks for the tool again."""

model_client = OpenAIChatCompletionClient(
    model="default",
    model_info=ModelInfo(
        vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False
    ),
)


async def solve(task_input: dict[str, str]) -> str:
    """Answer `{"question": …}`."""
    agent = AssistantAgent(
        "solver",
        model_client,
        tools=[calculator],
        system_message=SYSTEM_PROMPT,
        max_tool_iterations=MOST_TOOL_TURNS,
        reflect_on_tool_use=False,
    )
    last = (await agent.run(task=task_input["question"])).messages[-1]
    return last.content if isinstance(last, TextMessage) else "I did not find the answer."
