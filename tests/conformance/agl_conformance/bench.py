"""Plays one cell of the matrix on a real Lightning Server with a real store."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stack import Hooks, make_rollout

from agl_conformance.driver import API_NAMES, Program, Question, Setting
from agl_conformance.judge import differences
from agl_conformance.matrix import Cell
from agl_conformance.upstream import LossyRelay, PlayedUpstream
from agl_core.capture import ActiveAttempt, Recording, running
from agl_core.config.models import SamplingSection
from agl_core.learning import build_episode
from agl_core.protocols import Upstream
from agl_core.server import LightningServer
from agl_core.store.sqlite import SqliteStore
from agl_core.types import AttemptKey, Ending
from agl_core.wire.headers import rollout_path
from agl_core.wire.workers import CloseRequest, LeaseRequest
from agl_core.worker.environment import PLACEHOLDER_KEY

_PATIENCE = 90.0
"""Seconds that a cell may take."""


@dataclass
class Bench:
    """A server, its store, the scripted upstream, and the relay that loses replies."""

    server: LightningServer
    store: SqliteStore
    upstream: PlayedUpstream
    relay: LossyRelay
    _ids: Iterator[int] = field(default_factory=itertools.count)

    async def check(self, cell: Cell) -> None:
        """AssertionError if the cell does not pass; or if it does, and is declared a gap."""
        if cell.gap is None:
            assert await self.play(cell) == []
            return
        try:
            wrong = await self.play(cell)
        except Exception:
            return
        assert wrong, f"The cell passes although it is declared a gap ({cell.gap}). Take the gap out of the driver."

    async def play(self, cell: Cell) -> list[str]:
        """What differs from the expected episode, in each of the scenario's rollouts."""
        scenario = cell.scenario
        self.upstream.play(scenario)
        self.relay.lose(scenario.lost)
        root = self.relay.url if scenario.lost else self.server.base_url
        setting = Setting(cell.api, cell.streaming, cell.form, root, PLACEHOLDER_KEY)
        with cell.driver.attached(cell.form):
            program = cell.driver.build(scenario, setting)
            keys = [await self._lease() for _ in range(scenario.rollouts)]
            questions = zip(keys, scenario.questions(), strict=True)
            async with asyncio.timeout(_PATIENCE):
                wrong = await asyncio.gather(*(self._roll_out(program, key, root, text) for key, text in questions))
        found = [*itertools.chain(*wrong), *self.upstream.faults]
        for key in keys:
            found += await self._judge(cell, key)
        return found

    async def _roll_out(self, program: Program, key: AttemptKey, root: str, question: str) -> list[str]:
        """As a worker does: run the agent, and close the attempt with what was reported. What adapters could not do."""
        api_key = self.server.keys.of_attempt(key)
        active = ActiveAttempt(*key, base_url=root, api_key=api_key, recording=Recording())

        async def run() -> None:
            with running(active):
                await program(Question(question, f"{root}{rollout_path(*key)}", api_key))

        try:
            await asyncio.create_task(run())
        finally:
            active.recording.close()
            report = CloseRequest(ending=Ending.FINISHED, tool_results=list(active.recording.tool_results))
            await self.server.queue.close_attempt(key, report)
        return [f"an adapter's problem: {text}" for text in active.recording.problems]

    async def _judge(self, cell: Cell, key: AttemptKey) -> list[str]:
        (attempt,) = await self.store.attempts(key.rollout)
        calls = await self.store.calls([key])
        found = [f"a call by {call.api}" for call in calls if call.api != API_NAMES[cell.api]]
        found += [
            f"call {call.sequence}: streaming is {not cell.streaming}"
            for call in calls
            if bool(call.request.get("stream")) is not cell.streaming
        ]
        rollout, tool_results = await self.store.rollout(key.rollout), await self.store.tool_results([key])
        return found + differences(cell.scenario.expected, build_episode(rollout, attempt, calls, tool_results))

    async def _lease(self) -> AttemptKey:
        rollout = make_rollout(f"r{next(self._ids)}")
        await self.server.queue.enqueue([rollout])
        (lease,) = (await self.server.queue.lease(LeaseRequest(worker="w", capacity=1))).leases
        return AttemptKey(lease.rollout, lease.attempt)


@contextlib.asynccontextmanager
async def running_bench(folder: Path) -> AsyncIterator[Bench]:
    """The store is below `folder`."""
    sampling = SamplingSection(temperature=0.7, max_tokens=4096)
    async with PlayedUpstream() as upstream, SqliteStore(folder / "store.sqlite") as store:
        served = Upstream(urls=(upstream.url,), models={"default": "served"}, api_key="upstream-key")
        async with (
            LightningServer(store, served, sampling=sampling, seed=1, timeout=60, attempts=1, hook=Hooks()) as server,
            LossyRelay(server.base_url) as relay,
        ):
            yield Bench(server, store, upstream, relay)
