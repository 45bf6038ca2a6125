"""Rollouts per second of a LangChain agent by the number of worker processes beside the server.

python -m tests.benchmarks.workers [ROLLOUTS]

Server and scripted upstream share the interpreter that in a run is the trainer's; with one process the agent does too.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from pathlib import Path
from typing import Any

from agl_core.client.agent import agent_environment, client_variables
from agl_core.client.local import choose_runner, workers_beside
from agl_core.config.models import AgentSection, UntrainedConfig, WorkerSection
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.types import Task
from agl_server.testing import Stack, running_stack

from .tables import machine, table

PROCESSES = (1, 2, 4)
ROUNDS = 3


@functools.cache
def agent() -> Any:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    return create_agent(ChatOpenAI(model="m"), [])


async def solve(question: Any) -> Any:
    return (await agent().ainvoke({"messages": [("user", question)]}))["messages"][-1].text


async def seconds(stack: Stack, name: str, count: int) -> float:
    """The time that so many rollouts take."""
    rollouts = [make.rollout(f"{name}-{number}", task=Task(name, "hi")) for number in range(count)]
    begun = time.perf_counter()
    await stack.server.queue.enqueue(rollouts)
    for rollout in rollouts:
        [done] = await stack.server.queue.done([rollout.id])
        assert done.ending == "finished"
    return time.perf_counter() - begun


async def rate(processes: int, count: int) -> float:
    """Rollouts per second in the best of some rounds."""
    sections = {"agent": AgentSection(entry=f"{__name__}:solve"), "workers": WorkerSection(processes=processes)}
    config = UntrainedConfig(config_version=1, folder=Path.cwd(), **sections)
    async with running_stack(timeout=600) as stack:
        server = stack.server
        with agent_environment(client_variables(server.base_url)):
            runner = choose_runner(config, Plugins.load(), server.base_url)
            workers = await workers_beside(config, runner, server.base_url, server.worker_key)
            workers.begin()
            try:
                await seconds(stack, "warm-up", 4 * processes)
                return count / min([await seconds(stack, str(round), count) for round in range(ROUNDS)])
            finally:
                await workers.stop()


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    print(machine())
    print(table("Worker processes | rollouts/s", [f"{n} | {asyncio.run(rate(n, count)):.0f}" for n in PROCESSES]))


if __name__ == "__main__":
    from tests.benchmarks import workers  # Its agent is found by the module's name.

    workers.main()
