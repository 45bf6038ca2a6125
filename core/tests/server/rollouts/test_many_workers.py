"""Hundreds of workers at once, each with connections of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agl_core.store.sqlite import SqliteStore
from agl_core.testing import episodes as make
from agl_core.testing.server import running_stack, until
from agl_core.types import Ending, RolloutState

WORKERS, ROLLOUTS = 300, 1000


@pytest.mark.storm
async def test_three_hundred_workers_do_a_thousand_rollouts(tmp_path: Path) -> None:
    """They lease, send heartbeats and report. One in ten of their reports is sent twice; none gets an error."""
    seen: dict[str, list[str]] = {}
    patient = {"timeout": 600, "lease": 600.0}
    async with SqliteStore(tmp_path / "store.sqlite") as store, running_stack(store=store, **patient) as stack:
        url = f"{stack.server.base_url}/agl/v1"

        async def work(name: str) -> None:
            async with aiohttp.ClientSession() as session:

                async def ask(path: str, body: dict[str, Any], key: str = stack.server.worker_key) -> Any:
                    bearer = {"Authorization": f"Bearer {key}"}
                    async with session.post(f"{url}/{path}", json=body, headers=bearer) as response:
                        assert response.status == 200, await response.text()
                        return await response.json()

                while True:
                    reply = await ask("leases", {"worker": name, "capacity": 2, "wait": 60})
                    if reply["closed"]:
                        return
                    held = [{name: each[name] for name in ("rollout", "attempt", "secret")} for each in reply["leases"]]
                    beat = await ask("heartbeats", {"worker": name, "attempts": held})
                    assert beat == {"lost": [], "closed": False}
                    for each in held:
                        place = f"rollouts/{each['rollout']}/attempts/{each['attempt']}/close"
                        for _ in range(2 if each["rollout"].endswith("7") else 1):
                            report = {"ending": "cancelled", "result": name}
                            assert await ask(place, report, each["secret"]) == {"counted": True}
                        seen.setdefault(name, []).append(each["rollout"])

        working = [asyncio.ensure_future(work(f"w{number}")) for number in range(WORKERS)]
        try:
            await until(lambda: stack.server.queue.waiting == WORKERS)
            for start in range(0, ROLLOUTS, 250):
                await stack.server.queue.enqueue([make.rollout(f"r{start + number}") for number in range(250)])
            left = {f"r{number}" for number in range(ROLLOUTS)}
            while left:
                left -= {each.id for each in await stack.server.queue.done(left)}
            stack.server.queue.close()
            await asyncio.gather(*working)
        finally:
            for each in working:
                each.cancel()
            await asyncio.gather(*working, return_exceptions=True)
        stored = {each.id: each for each in await store.rollouts()}
        assert all(each.state is RolloutState.DONE and each.ending is Ending.CANCELLED for each in stored.values())
        for worker, ids in seen.items():
            for id in ids:
                (attempt,) = await store.attempts(id)
                assert (attempt.worker, attempt.result) == (worker, worker)
        assert sum(map(len, seen.values())) == ROLLOUTS == len(stored)
