"""The Lightning Server that is measured, in a process of its own: `python server_process.py STORE UPSTREAM [CORE]`.

Prints its port and the workers' key, then does what is asked of it, one line of JSON each:

    {"do": "keep", "queued": N}                            from now on keep N rollouts in the queue, as a trainer would
    {"do": "fill", "rollouts": N, "turns": T}              store N rollouts of T calls
    {"do": "store", "runners": R, "turns": T, "queued": N, "seconds": S}    measure the store in a file of its own
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from server_cores import pin
from server_records import some_rollouts, stored_rollout
from server_rollouts import Trainer, run_rollouts

from agl_core.config.models import SamplingSection
from agl_core.plugins import Plugins
from agl_core.protocols import Upstream
from agl_core.server import LightningServer
from agl_core.server.http.event_loop import run
from agl_core.store.sqlite import SqliteStore
from agl_core.wire.trainers import RunSettings

AT_ONCE = 200
"""Rollouts written in one transaction where a store is filled."""


async def commands() -> AsyncIterator[dict[str, Any]]:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


def answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


async def fill(store: SqliteStore, rollouts: int, turns: int) -> None:
    for start in range(0, rollouts, AT_ONCE):
        made = some_rollouts(min(AT_ONCE, rollouts - start))
        await store.put(*(record for rollout in made for record in stored_rollout(rollout, turns)))


async def serve(path: Path, upstream: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(SqliteStore(path))
        server = LightningServer(
            store,
            Upstream((upstream,), {"default": "served"}, "upstream-key"),
            RunSettings(sampling=SamplingSection(), seed=0, timeout=600, attempts=1),
            Plugins().hook,
        )
        await stack.enter_async_context(server)
        trainer = Trainer(server.queue)
        training = asyncio.create_task(trainer.train())
        answer(port=int(server.base_url.rpartition(":")[2]), key=server.worker_key)
        async for command in commands():
            started = time.perf_counter()
            match command:
                case {"do": "keep", "queued": queued}:
                    await trainer.add(queued)
                    answer(seconds=time.perf_counter() - started)
                case {"do": "fill", "rollouts": rollouts, "turns": turns}:
                    await fill(store, rollouts, turns)
                    answer(seconds=time.perf_counter() - started)
                case {"do": "store", "runners": runners, "turns": turns, "queued": queued, "seconds": seconds}:
                    place = path.with_name(f"{runners}-{turns}-{time.monotonic_ns()}.sqlite")
                    measured = await run_rollouts(place, runners, turns, queued, seconds)
                    answer(rollouts=measured.rollouts, seconds=measured.seconds)
        training.cancel()


if __name__ == "__main__":
    pin(sys.argv[3:])
    run(serve(Path(sys.argv[1]), sys.argv[2]))
