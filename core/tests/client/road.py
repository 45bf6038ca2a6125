"""Shared by tests of workers: one LLM call, and the way to a server, which a test can close and open again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import openai

from agl_core.client.agent import Agent, AgentContext, TaskPerAttempt


async def ask(context: AgentContext, text: str = "hi") -> str:
    """One LLM call through the attempt's own base URL."""
    async with openai.AsyncOpenAI(base_url=context.base_url, api_key=context.api_key) as client:
        reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    return str(reply.choices[0].message.content)


async def answer(task_input: Any, context: AgentContext) -> str:
    """An agent of one call."""
    return await ask(context)


def as_tasks(function: Callable[..., Any]) -> TaskPerAttempt:
    """Runs an async agent, which gets the task's input and its context."""
    return TaskPerAttempt(Agent("test:agent", function, wants_context=True, is_async=True))


ASK = """
    import httpx, os

    def ask():
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        httpx.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body, headers=headers).raise_for_status()
"""
"""A program that can make one, by its environment."""


class Road:
    """The way to a server, which can be closed and opened again, as when the server is killed and restarted."""

    def __init__(self, base_url: str) -> None:
        self._port = int(base_url.rpartition(":")[2])
        self._listening: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._listening = await asyncio.start_server(self._carry, "127.0.0.1", self.port)
        self.port = self._listening.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._listening.close()
        for connection in self._open:
            connection.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._open.add(back)
        if writer.is_closing():  # The road was closed meanwhile.
            back.close()

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(2**16):
                    sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, back), pump(there, writer))
