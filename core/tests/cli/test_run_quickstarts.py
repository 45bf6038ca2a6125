"""`agl run -- python agent.py` with each framework's first script as its own documentation shows it, unmodified."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_core.testing.scripts import CallTools, Say
from agl_core.types import Ending, Episode

from .run_stack import Bench, bench

WEATHER = [CallTools([("get_weather", {"city": "New York"})]), Say("It is sunny in New York.")]

PLAIN = """
from openai import OpenAI

client = OpenAI()

response = client.responses.create(
    model="gpt-5.5",
    input="Write a one-sentence bedtime story about a unicorn."
)

print(response.output_text)
"""

LANGCHAIN = """
from langchain.agents import create_agent

def get_weather(city: str) -> str:
    \"\"\"Get weather for a given city.\"\"\"
    return f"It's always sunny in {city}!"

agent = create_agent(
    model="openai:gpt-5.4",
    tools=[get_weather],
    system_prompt="You are a helpful assistant",
)

result = agent.invoke(
    {"messages": [{"role": "user", "content": "What's the weather in New York?"}]}
)
print(result["messages"][-1].content)
"""

AUTOGEN = """
import asyncio
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.ui import Console
from autogen_ext.models.openai import OpenAIChatCompletionClient

model_client = OpenAIChatCompletionClient(model="gpt-4o")

async def get_weather(city: str) -> str:
    \"\"\"Get the weather for a given city.\"\"\"
    return f"The weather in {city} is 73 degrees and Sunny."

agent = AssistantAgent(
    name="weather_agent",
    model_client=model_client,
    tools=[get_weather],
    system_message="You are a helpful assistant.",
    reflect_on_tool_use=True,
    model_client_stream=True,  # Enable streaming tokens from the model client.
)

async def main() -> None:
    await Console(agent.run_stream(task="What is the weather in New York?"))
    await model_client.close()

asyncio.run(main())
"""

AGENTS_SDK = """
from agents import Agent, Runner, function_tool

@function_tool
def get_weather(city: str) -> str:
    \"\"\"returns weather info for the specified city.\"\"\"
    return f"The weather in {city} is sunny"

agent = Agent(
    name="Haiku agent",
    instructions="Always respond in haiku form",
    tools=[get_weather],
)

result = Runner.run_sync(agent, "What is the weather in New York?")
print(result.final_output)
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Bench]:
    with bench(tmp_path) as found:
        yield found


def tools(episode: Episode) -> list[tuple[str, str, Any]]:
    return [(o.tool, o.status.value, o.arguments) for t in episode.transitions for o in t.tool_results]


@pytest.mark.storm
@pytest.mark.parametrize(
    ("code", "agent"),
    [
        pytest.param(LANGCHAIN, "model", id="langchain"),
        pytest.param(AUTOGEN, "weather_agent", id="autogen"),
        pytest.param(AGENTS_SDK, "Haiku agent", id="openai-agents"),
    ],
)
def test_the_frameworks_first_script_is_recorded_whole(running: Bench, code: str, agent: str) -> None:
    running.script("agent.py", code)
    running.answers(Say("OK"), *WEATHER)

    result = running.run(sys.executable, "agent.py")

    assert result.returncode == 0, result.stderr
    assert "sunny in New York" in result.stdout
    rollout, attempt, episode = running.recorded()
    assert (rollout.ending, attempt.ending) == (Ending.FINISHED, Ending.FINISHED)
    assert [t.agent for t in episode.transitions] == [agent, agent]
    assert all(t.has_ids and t.logprobs is not None for t in episode.transitions)
    assert tools(episode) == [("get_weather", "ok", {"city": "New York"})]
    assert episode.unjoined == ()
    assert f"finished: 2 LLM calls by {agent}, 1 tool results" in result.stderr
    assert "problem" not in result.stderr


@pytest.mark.storm
def test_the_clients_own_first_script_is_recorded(running: Bench) -> None:
    running.script("agent.py", PLAIN)
    running.answers(Say("OK"), Say("Once upon a time."))

    result = running.run(sys.executable, "agent.py")

    assert (result.returncode, result.stdout) == (0, "Once upon a time.\n"), result.stderr
    _, _, episode = running.recorded()
    [transition] = episode.transitions
    assert transition.has_ids
    assert bytes(transition.response_ids[:-1].astype("uint8")).decode() == "Once upon a time."
