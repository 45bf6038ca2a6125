"""An agent of one call on the plain openai client: it passes the question on. It knows nothing of agl."""

from __future__ import annotations

from openai import AsyncOpenAI

client = AsyncOpenAI()
"""One for all rollouts: a client of its own for each would spend more time on TLS certificates than on its call."""


async def solve(task_input: dict[str, str]) -> str:
    """Answer `{"question": …}`."""
    reply = await client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": task_input["question"]}]
    )
    return reply.choices[0].message.content or ""
