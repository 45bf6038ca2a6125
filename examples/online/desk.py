"""A travel desk: an ordinary agent on the `openai` client, with one tool. It knows nothing of agl."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from flights import AIRLINES, CITIES, fare
from openai import AsyncOpenAI

SYSTEM_PROMPT = "Find a fare."
MOST_CALLS = 3
"""Replies of the model before the desk gives up."""

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "The cheapest fare to a city, or that of an airline.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]


@dataclass(frozen=True)
class Answer:
    """The desk's answer, and the id of the model's reply with it."""

    text: str
    reply: str


async def answer(question: str, client: AsyncOpenAI) -> Answer:
    """Answer a traveller, and search as the model asks."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    said = Answer("I could not find out.", "")
    for _ in range(MOST_CALLS):
        completion = await client.chat.completions.create(model="default", messages=messages, tools=TOOLS)
        reply = completion.choices[0].message
        said = Answer(said.text, completion.id)
        if not reply.tool_calls:
            return Answer(reply.content or "", completion.id)
        messages.append(reply.model_dump(include={"role", "content", "tool_calls"}))
        for call in reply.tool_calls:
            found = search(call.function.arguments) if call.type == "function" else "Error: no such tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return said


async def solve(task_input: dict[str, str]) -> str:
    """Answer `{"question": …}`; the environment has the address and the key of the model."""
    return (await answer(task_input["question"], _client())).text


@cache
def _client() -> AsyncOpenAI:
    return AsyncOpenAI()


def search(arguments: str) -> str:
    """The tool's words to the model.

    >>> search('{"query": "Rome"}'), search('{"query": "Kite Rome"}'), search('{"query": "Atlantis"}')
    ('fare 20', 'fare 70', 'Error: no such flight')
    """
    try:
        words = str(json.loads(arguments)["query"]).split()
    except (ValueError, LookupError, TypeError):
        return "Error: no query"
    cities, airlines = [each for each in words if each in CITIES], [each for each in words if each in AIRLINES]
    if len(cities) != 1 or len(airlines) > 1:
        return "Error: no such flight"
    return f"fare {fare(cities[0], airlines[0] if airlines else None)}"
