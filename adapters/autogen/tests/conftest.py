"""The gateway in front of a scripted upstream, and attempts to run agents in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

from agl_autogen import plugin
from agl_core.client.agent import PLACEHOLDER_KEY
from agl_core.testing.scripts import CallTools, Say
from agl_server.testing import LeasedAttempt, Stack, attached_stack, no_problems  # noqa: F401

MODEL = ModelInfo(vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True)


def model_client(url: str, key: str = "key", **options: Any) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(model="m", base_url=url, api_key=key, model_info=MODEL, max_retries=0, **options)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with attached_stack(plugin.autogen_core, plugin.agentchat) as stack:
        yield stack


@pytest.fixture
async def trial(stack: Stack) -> LeasedAttempt:
    return await stack.attempt()


@pytest.fixture
def clients(stack: Stack) -> Callable[..., OpenAIChatCompletionClient]:
    """Makes clients with the server's URL alone: which attempt calls, its headers must tell."""
    return partial(model_client, stack.url(), PLACEHOLDER_KEY)


@pytest.fixture(params=["alone", "streaming in a team"])
def run(request: pytest.FixtureRequest, stack: Any, clients: Any, trial: Any) -> Callable[..., Any]:
    """Runs an agent whose model asks for the given tools; gives the tool results, all joined with its first call."""

    async def run(*calls: tuple[str, Mapping[str, Any]], tools: Any = None, **options: Any) -> Sequence[Any]:
        stack.upstream.script(CallTools(calls), Say("done"))
        in_team = request.param != "alone"
        agent = AssistantAgent("solver", clients(), tools=tools, model_client_stream=in_team, **options)
        with trial.running():
            await (RoundRobinGroupChat([agent], max_turns=1) if in_team else agent).run(task="hello")
        episode = await trial.close()
        assert episode.unjoined == ()
        assert len(trial.tool_results) == len(episode.transitions[0].tool_results)
        return episode.transitions[0].tool_results

    return run


@pytest.fixture(name="model_client")
def model_client_fixture() -> Callable[..., OpenAIChatCompletionClient]:
    return model_client
