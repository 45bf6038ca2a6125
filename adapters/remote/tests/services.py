"""A service on this machine, and a rollout for a remote agent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import openai
import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from agl_core.client.agent import AgentContext
from agl_core.types import Call, Json, Mode
from agl_remote import RemoteAgent
from agl_server.testing import Stack


@contextlib.asynccontextmanager
async def serving(*routes: BaseRoute) -> AsyncIterator[str]:
    """The address of a service with these routes."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="critical"))
    task = asyncio.create_task(server.serve([listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = True
        await task


async def ask_model(attempt: dict[str, Any], text: str) -> str:
    """One LLM call by what the service was sent."""
    options = {"api_key": attempt["api_key"], "default_headers": {**attempt["headers"], "x-agl-agent": "far"}}
    async with openai.AsyncOpenAI(base_url=attempt["base_url"], **options) as client:
        reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    return str(reply.choices[0].message.content)


async def roll_out(stack: Stack, agent: RemoteAgent, task: Json) -> tuple[Json, dict[str, float], list[Call]]:
    """The result, the rewards and the calls of an agent that is called as a worker does it."""
    attempt = await stack.attempt()
    context = AgentContext("t", "train", *attempt.key, Mode.TRAIN, stack.url(attempt.key), stack.key(attempt.key))
    with attempt.running():
        result = await agent(task, context)
    rewards = {reward.name: reward.value for reward in attempt.active.recording.rewards}
    return result, rewards, await attempt.calls()
