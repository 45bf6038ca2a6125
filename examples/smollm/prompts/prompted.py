"""The agent of one call, with a system prompt that has a name: the run says what it is."""

from __future__ import annotations

from openai import AsyncOpenAI

import agl_core

client = AsyncOpenAI()
"""One for all rollouts."""


async def solve(task_input: dict[str, str]) -> str:
    """Answer `{"question": …}`."""
    system = agl_core.prompt("system", "You are a helpful assistant.")
    reply = await client.chat.completions.create(
        model="default",
        messages=[{"role": "system", "content": system}, {"role": "user", "content": task_input["question"]}],
    )
    return reply.choices[0].message.content or ""
