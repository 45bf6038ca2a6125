"""An assistant for travellers, written from scratch on the `openai` client. It knows nothing of agl."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI
from trip_tools import MOST_CALLS, SYSTEM_PROMPT, TOOLS, use
from trips import trip

client = AsyncOpenAI()


async def help_traveller(task_input: dict[str, str]) -> str:
    """Answer `{"question": …, "traveller": …}`; the tools know the traveller, the model does not."""
    travelled = trip(task_input["traveller"])
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": task_input["question"]},
    ]
    for _ in range(MOST_CALLS):
        completion = await client.chat.completions.create(model="default", messages=messages, tools=TOOLS)  # type: ignore[arg-type]
        reply = completion.choices[0].message
        if not reply.tool_calls:
            return reply.content or ""
        messages.append(reply.model_dump(include={"role", "content", "tool_calls"}))
        for call in reply.tool_calls:
            said = use(travelled, call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return "I could not find out."
