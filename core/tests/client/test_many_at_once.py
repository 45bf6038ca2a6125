"""Workers that run more attempts than one request may name."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from agl_core.capture import Recording
from agl_core.server import LightningServer
from agl_core.testing import episodes as make
from agl_core.testing.server import until
from agl_core.types import Ending
from agl_core.wire.client import BlockingClient, LightningClient
from agl_core.wire.workers import Lease
from agl_core.worker import Runner
from agl_core.worker.report import Ended

PATIENCE = 200.0


class Waiting:
    """Runs attempts that end when the test says so."""

    abandoned = 0
    default_concurrency = 3

    def __init__(self) -> None:
        self.running = 0
        self.end = threading.Event()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, lease: Lease, base_url: str, recording: Recording) -> Ended:
        self.running += 1
        while not self.end.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return Ended(Ending.FINISHED)


@pytest.mark.parametrize("workplace", [{"timeout": 250, "lease": 16}], indirect=True)
async def test_it_asks_for_as_many_and_sends_heartbeats_for_all(
    workplace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for `--concurrency 5000`, with a limit of 4."""
    monkeypatch.setattr("agl_core.worker.worker.MAX_LEASES", 4)
    server: LightningServer = workplace.stack.server
    asked: list[int] = []
    beats: list[set[str]] = []
    ask, ask_blocking = LightningClient.ask, BlockingClient.ask

    async def asking(self: LightningClient, operation: Any, body: Any) -> Any:
        asked.append(body.capacity)
        return await ask(self, operation, body)

    def beating(self: BlockingClient, operation: Any, body: Any) -> Any:
        beats.append({each.rollout for each in body.attempts})
        return ask_blocking(self, operation, body)

    monkeypatch.setattr(LightningClient, "ask", asking)
    monkeypatch.setattr(BlockingClient, "ask", beating)
    runner = Waiting()
    checked: Runner = runner
    await server.queue.enqueue([make.rollout(f"r{number}") for number in range(10)])
    worker = workplace.start_runner(checked, concurrency=5000)
    async with asyncio.timeout(PATIENCE):
        await until(lambda: runner.running == 10)
        assert set(asked) == {4}
        beats.clear()
        await until(lambda: len(beats) > 6)
        assert max(map(len, beats)) == 4
        assert set().union(*beats) == {f"r{number}" for number in range(10)}
        runner.end.set()
        await until(lambda: worker.worker is not None and worker.worker.endings[Ending.FINISHED] == 10)
