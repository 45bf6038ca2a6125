"""An agent's client tries a call again while the server dies and comes back: it is one call all the same."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from scripted_upstream import ScriptedUpstream

from agl_core.config.models import SamplingSection
from agl_core.plugins import Plugins
from agl_core.protocols import Upstream
from agl_core.server import Keys, LightningServer
from agl_core.server.retries import HEADER_STAINLESS
from agl_core.store.sqlite import SqliteStore
from agl_core.types import AttemptKey, Mode, Rollout, Task
from agl_core.wire import Lease, LeaseRequest

ROLLOUT = Rollout("r", "run", 0, "g", Task("t", "?"), Mode.TRAIN, 1, 0)
BODY = {"model": "default", "messages": [{"role": "user", "content": "once"}]}


@pytest.mark.xfail(strict=True, reason="the next server does not know the call, makes another, and both count")
async def test_a_call_whose_reply_was_lost_with_the_server_counts_once(tmp_path: Path) -> None:
    keys, lease, acknowledged = Keys(), None, ""
    async with ScriptedUpstream() as scripted:
        upstream = Upstream((scripted.url,), {"default": "default"}, "key")
        for tries in range(2):
            async with SqliteStore(tmp_path / "store.sqlite") as store:
                server = LightningServer(
                    store,
                    upstream,
                    sampling=SamplingSection(),
                    seed=0,
                    timeout=60,
                    attempts=3,
                    hook=Plugins().hook,
                    keys=keys,
                    run="run",
                )
                await server.start()
                lease = lease or await leased(server)
                acknowledged = await ask(server, lease, tries)
                await server.stop(over=False)
                calls = await store.calls([AttemptKey("r", 0)])
    assert [call.id for call in calls if not call.late] == [acknowledged]


async def leased(server: LightningServer) -> Lease:
    await server.queue.enqueue([ROLLOUT])
    (lease,) = (await server.queue.lease(LeaseRequest(worker="w", capacity=1))).leases
    return lease


async def ask(server: LightningServer, lease: Lease, tries: int) -> str:
    """One request of an SDK that has sent it so often before; the id of the reply."""
    headers = {"Authorization": f"Bearer {lease.key}", HEADER_STAINLESS: str(tries)}
    async with httpx.AsyncClient(trust_env=False) as client:
        url = f"{server.base_url}{lease.path}/v1/chat/completions"
        reply = await client.post(url, json=BODY, headers=headers)
    assert reply.status_code == 200
    return str(reply.json()["id"])
