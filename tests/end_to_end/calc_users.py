"""Simulated users of the deployed calc agent, by the official client, in a process of their own.

    PYTHONPATH=examples/calc python -m tests.end_to_end.calc_users ADDRESS_FILE LOG

They ask the problems of the example's training split, run the calculator when the model asks for it, and give a thumbs
up if the answer is right. While the server is away they try again. Each finished session is a line of LOG.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import openai

USERS = 16
MOST_CALLS = 4


async def main(address: Path, log: Path) -> None:
    """Use it until this process is ended."""
    numbers = itertools.count()
    with log.open("a", buffering=1) as lines:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            await asyncio.gather(*(_user(address, http, numbers, lines) for _ in range(USERS)))


async def _user(address: Path, http: httpx.AsyncClient, numbers: itertools.count[int], lines: Any) -> None:
    for number in numbers:
        while True:
            try:
                at = json.loads(await asyncio.to_thread(address.read_text))
                done = await _session(at, http, number)
                lines.write(json.dumps(done) + "\n")
                break
            except (openai.APIError, httpx.HTTPError):
                await asyncio.sleep(0.2)


async def _session(at: dict[str, str], http: httpx.AsyncClient, number: int) -> dict[str, Any]:
    """One session, and what was said of it."""
    from calculator import SYSTEM_PROMPT, calculator
    from langchain_core.utils.function_calling import convert_to_openai_tool
    from problems import Split, problem

    from agl_rewards import last_number

    asked = problem(Split.TRAIN, 7, number)
    name = f"talk-{number}"
    client = openai.AsyncOpenAI(
        api_key=at["key"], base_url=f"{at['url']}/v1", http_client=http, max_retries=0,
        default_headers={"x-agl-session": name},
    )  # fmt: skip
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": asked.question},
    ]
    for _ in range(MOST_CALLS):
        reply = await client.chat.completions.create(
            model="default",
            messages=messages,
            tools=[convert_to_openai_tool(calculator)],  # type: ignore[list-item]
        )
        said = reply.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            break
        for each in said.tool_calls:
            try:
                result = calculator.invoke(json.loads(each.function.arguments))  # type: ignore[union-attr]
            except Exception as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
    right = last_number(said.content) == float(asked.result)
    await _post(http, at, "sessions/end", at["key"], session=name)
    rewards = {"thumbs": float(right)}
    found = await _post(http, at, "feedback", at["feedback"], session=name, rewards=rewards, id=f"said-{number}")
    return {"session": found["session"], "name": name, "right": right}


async def _post(http: httpx.AsyncClient, at: dict[str, str], route: str, key: str, **body: Any) -> dict[str, Any]:
    response = await http.post(f"{at['url']}/agl/v1/{route}", json=body, headers={"Authorization": f"Bearer {key}"})
    response.raise_for_status()
    found: dict[str, Any] = response.json()
    return found


if __name__ == "__main__":
    asyncio.run(main(*map(Path, sys.argv[1:3])))
