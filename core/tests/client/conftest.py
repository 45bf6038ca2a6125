"""A worker in front of a real server with a scripted model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from agl_core.client.agent import Agent, TaskPerAttempt
from agl_core.client.local import WorkerThread
from agl_core.client.worker import Runner
from agl_core.testing import episodes as make
from agl_core.types import Attempt, Json, Rollout, Task
from agl_server.testing import Stack, running_stack


@dataclass
class Workplace:
    """Runs agents by a worker thread and returns what became of their rollouts."""

    stack: Stack
    workers: list[WorkerThread]

    async def run(self, function: Callable[..., Any], inputs: list[Json]) -> dict[int, tuple[Rollout, Attempt]]:
        """Run one rollout per input to its end; the records by the input's index."""
        return await self.finish(self.start(function), inputs)

    async def finish(self, worker: WorkerThread, inputs: list[Json]) -> dict[int, tuple[Rollout, Attempt]]:
        """Run one rollout per input to its end by this worker, which is stopped then."""
        rollouts = [make.rollout(f"w{i}", task=Task(f"t{i}", task_input)) for i, task_input in enumerate(inputs)]
        await self.stack.server.queue.enqueue(rollouts)
        done = [finished for rollout in rollouts for finished in await self.stack.server.queue.done([rollout.id])]
        await worker.stop()
        ended = {}
        for rollout in done:
            attempts = await self.stack.store.attempts(rollout.id)
            ended[int(rollout.id[1:])] = (rollout, attempts[-1])
        return ended

    def start(self, function: Callable[..., Any], *, concurrency: int = 8) -> WorkerThread:
        agent = Agent("test:agent", function, wants_context=True, is_async=True)
        return self.start_runner(TaskPerAttempt(agent), concurrency=concurrency)

    def start_runner(self, runner: Runner, *, concurrency: int | None = 8) -> WorkerThread:
        worker = WorkerThread(
            runner,
            base_url=self.stack.server.base_url,
            worker_key=self.stack.server.worker_key,
            concurrency=concurrency,
        )
        worker.begin()
        self.workers.append(worker)
        return worker


@pytest.fixture
async def workplace(request: pytest.FixtureRequest) -> AsyncIterator[Workplace]:
    """`@pytest.mark.parametrize("workplace", [{"timeout": 1.0}], indirect=True)` changes the server's settings."""
    async with running_stack(**{"timeout": 120, **getattr(request, "param", {})}) as stack:
        running = Workplace(stack, [])
        yield running
        for worker in running.workers:
            await worker.stop()
