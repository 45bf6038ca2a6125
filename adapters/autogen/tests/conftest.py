"""The gateway in front of a scripted upstream, and attempts to run agents in."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

sys.path.append(str(Path(__file__).parents[3] / "core" / "tests" / "server"))

from scripted_upstream import CallTools, Raw, Say
from stack import Stack, running_stack

import agl_core
from agl_autogen.plugin import AgentChatAdapter, AutoGenCoreAdapter
from agl_core.capture import ActiveAttempt, Recording, reports, running
from agl_core.learning import build_episode
from agl_core.types import Attempt, AttemptKey, Call, Ending, Episode, ToolResult
from agl_core.worker.environment import PLACEHOLDER_KEY

MODEL = ModelInfo(vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True)


def model_client(url: str, key: str = "key", **options: Any) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(model="m", base_url=url, api_key=key, model_info=MODEL, max_retries=0, **options)


def broken_arguments(tool: str) -> Raw:
    """A reply that asks for a tool with arguments that are no JSON."""
    call = {"id": "call_broken", "type": "function", "function": {"name": tool, "arguments": "{a"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    reply = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return Raw(json.dumps(reply).encode())


@dataclass
class Trial:
    """One attempt at the gateway, with what its agent reported."""

    stack: Stack
    key: AttemptKey
    active: ActiveAttempt

    def running(self) -> contextlib.AbstractContextManager[None]:
        return running(self.active)

    @property
    def tool_results(self) -> list[Any]:
        return list(self.active.recording.tool_results)

    async def calls(self) -> list[Call]:
        return sorted(await self.stack.calls(self.key), key=lambda call: call.sequence)

    async def agents(self) -> list[str | None]:
        return [call.agent for call in await self.calls()]

    async def episode(self) -> Episode:
        """What agl makes of what the gateway and the adapter recorded."""
        [rollout] = [r for r in await self.stack.store.rollouts() if r.id == self.key.rollout]
        attempt = Attempt(*self.key, worker="w", started=0, ending=Ending.FINISHED)
        tool_results = [ToolResult(rollout=self.key.rollout, attempt=0, **o.model_dump()) for o in self.tool_results]
        return build_episode(rollout, attempt, await self.calls(), tool_results)


@dataclass
class World:
    """The gateway, its upstream, and a model client that any number of attempts may share."""

    stack: Stack

    @property
    def upstream(self) -> Any:
        return self.stack.upstream

    def client(self, **options: Any) -> OpenAIChatCompletionClient:
        """A client with the server's URL alone: which attempt calls, its headers must tell."""
        return model_client(self.stack.url(), PLACEHOLDER_KEY, **options)

    async def trial(self) -> Trial:
        key = await self.stack.lease()
        server = self.stack.server
        active = ActiveAttempt(key.rollout, key.attempt, server.base_url, self.stack.key(key), Recording())
        return Trial(self.stack, key, active)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    attachment = agl_core.attach([AutoGenCoreAdapter(), AgentChatAdapter()])
    assert not attachment.failed
    async with running_stack() as stack:
        yield World(stack)
    attachment.detach()


@pytest.fixture
async def trial(world: World) -> Trial:
    return await world.trial()


@pytest.fixture(params=["alone", "streaming in a team"])
def run(request: pytest.FixtureRequest, world: Any, trial: Any) -> Callable[..., Any]:
    """Runs an agent whose model asks for the given tools; gives the tool results, all joined with its first call."""

    async def run(*calls: tuple[str, Mapping[str, Any]], tools: Any = None, **options: Any) -> Sequence[Any]:
        world.upstream.script(CallTools(calls), Say("done"))
        in_team = request.param != "alone"
        agent = AssistantAgent("solver", world.client(), tools=tools, model_client_stream=in_team, **options)
        with trial.running():
            await (RoundRobinGroupChat([agent], max_turns=1) if in_team else agent).run(task="hello")
        episode = await trial.episode()
        assert episode.unjoined == ()
        assert len(trial.tool_results) == len(episode.transitions[0].tool_results)
        return episode.transitions[0].tool_results

    return run


@pytest.fixture(name="model_client")
def model_client_fixture() -> Callable[..., OpenAIChatCompletionClient]:
    return model_client


@pytest.fixture(name="broken_arguments")
def broken_arguments_fixture() -> Callable[[str], Raw]:
    return broken_arguments


@pytest.fixture(autouse=True)
def no_problems(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Adapters swallow their failures; here they fail the test, unless it is about them."""
    yield
    if "expects_problems" not in request.keywords:
        assert [r.getMessage() for r in caplog.get_records("call") if r.name == reports.__name__] == []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "expects_problems: the test makes an adapter fail")
