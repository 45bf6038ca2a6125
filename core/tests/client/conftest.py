"""A worker in front of a real server with a scripted model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from agl_core.client.local import WorkerThread
from agl_core.client.worker import Runner
from agl_core.testing import episodes as make
from agl_core.types import Attempt, Json, Rollout, Task
from agl_core.wire import Assignment, LeaseRequest
from agl_server.testing import Stack, running_stack

from .road import as_tasks


@dataclass
class Workplace:
    """Runs agents by a worker thread and returns what became of their rollouts."""

    stack: Stack
    workers: list[WorkerThread] = field(default_factory=list)

    async def run(self, agent: Runner | Callable[..., Any], inputs: list[Json]) -> list[tuple[Rollout, Attempt]]:
        """Run one rollout per input to its end; the records of each."""
        return await self.finish(self.start(agent), inputs)

    async def finish(self, worker: WorkerThread, inputs: list[Json]) -> list[tuple[Rollout, Attempt]]:
        """Run one rollout per input to its end by this worker, which is stopped then."""
        rollouts = [make.rollout(f"w{i}", task=Task(f"t{i}", task_input)) for i, task_input in enumerate(inputs)]
        await self.stack.server.queue.enqueue(rollouts)
        done = [finished for rollout in rollouts for finished in await self.stack.server.queue.done([rollout.id])]
        await worker.stop()
        return [(rollout, (await self.stack.store.attempts(rollout.id))[-1]) for rollout in done]

    def start(self, agent: Runner | Callable[..., Any], *, concurrency: int = 8) -> WorkerThread:
        """A worker of a runner, or of an async agent."""
        server, runner = self.stack.server, as_tasks(agent) if callable(agent) else agent
        worker = WorkerThread(runner, base_url=server.base_url, worker_key=server.worker_key, concurrency=concurrency)
        worker.begin()
        self.workers.append(worker)
        return worker

    async def lease(self, task_input: Json = None, id: str = "w0") -> Assignment:
        """An attempt for a runner without a worker."""
        queue = self.stack.server.queue
        await queue.enqueue([make.rollout(id, task=Task("t", task_input))])
        [lease] = (await queue.lease(LeaseRequest(worker="w", capacity=1))).leases
        return lease.assignment


@pytest.fixture
async def workplace(request: pytest.FixtureRequest) -> AsyncIterator[Workplace]:
    """`@pytest.mark.parametrize("workplace", [{"timeout": 1.0}], indirect=True)` changes the server's settings."""
    async with running_stack(**{"timeout": 120, **getattr(request, "param", {})}) as stack:
        running = Workplace(stack)
        yield running
        for worker in running.workers:
            await worker.stop()
