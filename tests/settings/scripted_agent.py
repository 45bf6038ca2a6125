"""An agent that does what its task says: {"answer": …, "calls": n, "agents": […], "wait": seconds, "fails": …}."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import sys
from typing import Any

import httpx

import agl_core
from agl_core.capture.requests import HEADER_AGENT
from agl_core.client.agent import AgentContext


async def solve(task_input: Any, context: AgentContext) -> Any:
    """Its calls, then the answer."""
    if task_input.get("fails") == "first-attempt" and context.attempt == 0:
        raise ConnectionError("the tool's server is not up yet")
    agents = task_input.get("agents", ["solver"])
    for number in range(task_input.get("calls", 1)):
        await _ask(context.base_url, context.api_key, agents[number % len(agents)])
    await asyncio.sleep(task_input.get("wait", 0))
    return task_input["answer"]


async def solve_badly(task_input: Any, context: AgentContext) -> Any:
    """The same calls, and nonsense."""
    await solve(task_input, context)
    return "nonsense"


async def solve_unaware(task_input: Any) -> Any:
    """An agent that knows nothing of agl: its client goes where the environment says."""
    await _ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    return task_input["answer"]


async def solve_somewhere(task_input: Any, context: AgentContext) -> int:
    await solve(task_input, context)
    return os.getpid()


async def solve_prompted(task_input: Any, context: AgentContext) -> Any:
    await _ask(context.base_url, context.api_key, system=agl_core.prompt("system", "Be brief."))
    return task_input["answer"]


def solve_big(task_input: Any, context: AgentContext) -> Any:
    """A sync agent that asks for two gibibytes."""
    asyncio.run(solve(task_input, context))
    with mmap.mmap(-1, 2**31, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        return len(memory)


async def _ask(base_url: str, key: str, agent: str = "solver", system: str | None = None) -> None:
    messages = [{"role": "user", "content": "hello"}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    async with httpx.AsyncClient(verify=False, trust_env=False) as client:
        await client.post(
            f"{base_url}/chat/completions",
            json={"model": "default", "messages": messages},
            headers={"Authorization": f"Bearer {key}", HEADER_AGENT: agent},
        )


if __name__ == "__main__":
    asyncio.run(solve_unaware(json.loads(os.environ["AGL_TASK"])))
    print(*["it is a command", *sys.argv[1:]])
