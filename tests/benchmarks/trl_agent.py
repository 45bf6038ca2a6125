"""An agent of one call on the plain openai client: it passes the question on."""

from __future__ import annotations

from openai import AsyncOpenAI

client = AsyncOpenAI()


async def solve(question: str) -> str:
    reply = await client.chat.completions.create(model="default", messages=[{"role": "user", "content": question}])
    return reply.choices[0].message.content or ""
