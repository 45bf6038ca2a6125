"""A Lightning Server in a process that a test may kill: `python killable_server.py STORE`.

Prints one line of JSON (base URL, and path and key of each attempt that it leased out) and serves until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from agl_core.config.models import SamplingSection
from agl_core.plugins import Plugins
from agl_core.protocols import Upstream
from agl_core.server import LightningServer
from agl_core.server.upstream import RunSettings
from agl_core.store.sqlite import SqliteStore
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import Mode, Rollout, Task
from agl_core.wire.workers import LeaseRequest

ROLLOUTS = 16


async def serve(store_path: Path) -> None:
    async with SqliteStore(store_path) as store, ScriptedUpstream() as scripted:
        upstream = Upstream((scripted.url,), {"default": "default"}, "key")
        settings = RunSettings(sampling=SamplingSection(), seed=0, timeout=60, attempts=1)
        async with LightningServer(store, upstream, settings, Plugins().hook) as server:
            name = f"{os.getpid()}"
            await server.queue.enqueue(
                [Rollout(f"{name}-{i}", "run", 0, name, Task("t", "?"), Mode.TRAIN, 1, i) for i in range(ROLLOUTS)]
            )
            reply = await server.queue.lease(LeaseRequest(worker="w", capacity=ROLLOUTS))
            ready = {"url": server.base_url, "attempts": [[lease.path, lease.key] for lease in reply.leases]}
            sys.stdout.write(json.dumps(ready) + "\n")
            sys.stdout.flush()
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
