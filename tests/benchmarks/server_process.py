"""The measured Lightning Server, in a process of its own: `python server_process.py STORE UPSTREAM [CORE]`.

Prints its port and the workers' key, then answers commands, one line of JSON each:

    {"do": "keep", "queued": N}                            keep N rollouts more in the queue, as a trainer would
    {"do": "fill", "rollouts": N, "turns": T}              store N rollouts of T calls
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from server_load import chat, pin
from server_peers import PROMPT_IDS, RESPONSE_IDS, SAID

from agl_core.config.models import SamplingSection
from agl_core.plugins import Plugins
from agl_core.protocols import Upstream
from agl_core.store import Record
from agl_core.testing import episodes as make
from agl_core.types import Ending, Rollout, RolloutState, Task
from agl_server.gateway.attempts import RunSettings
from agl_server.http.listening import run
from agl_server.queue import RolloutQueue
from agl_server.server import LightningServer
from agl_server.store.sqlite import SqliteStore

GROUP = 8
"""Rollouts of one task."""
AT_ONCE = 200
"""Rollouts written in one transaction where a store is filled."""
TRAINER_INTERVAL = 0.05
"""Seconds between two looks of the trainer."""


def new_rollouts(n_rollouts: int) -> list[Rollout]:
    """Rollouts in groups, each group with a task of its own."""
    rollouts: list[Rollout] = []
    for number in range(n_rollouts):
        if number % GROUP == 0:
            group = uuid4().hex
            question = {"question": f"When does my train leave? Question {group}"}
            task = Task(group, question, metadata={"answer": "09:30"})
        rollouts.append(make.rollout(uuid4().hex, group=group, task=task, step=1, member=number % GROUP))
    return rollouts


def records_of(rollout: Rollout, turns: int) -> list[Record]:
    """All records of a rollout that is done: those of a group ask the same and get different answers."""
    done = replace(rollout, state=RolloutState.DONE, counted_attempt=0, ending=Ending.FINISHED)
    tokens = np.arange(RESPONSE_IDS, dtype=np.int32)
    logprobs, prompt = np.linspace(-1, 0, RESPONSE_IDS, dtype=np.float32), np.arange(PROMPT_IDS, dtype=np.int32)
    records: list[Record] = [done, make.attempt(rollout.id, result="09:30")]
    for turn in range(turns):
        message = {"role": "assistant", "content": f"{SAID} {rollout.id} {turn}"}
        choice = make.choice(message=message, response_ids=tokens, logprobs=logprobs)
        call = {"id": f"chatcmpl-{uuid4().hex}", "request": chat(turn, rollout.group), "prompt_ids": prompt}
        records.append(make.call(turn, choice, rollout=rollout.id, **call))
    return records


async def fill(store: SqliteStore, n_rollouts: int, turns: int) -> None:
    for start in range(0, n_rollouts, AT_ONCE):
        rollouts = new_rollouts(min(AT_ONCE, n_rollouts - start))
        await store.put(*(record for rollout in rollouts for record in records_of(rollout, turns)))


class Trainer:
    """Replaces each rollout that is done by a new one, some at a time."""

    def __init__(self, queue: RolloutQueue) -> None:
        self._queue = queue
        self._rollouts: set[str] = set()
        """Those that are not done."""
        self._added = asyncio.Event()

    async def add(self, n_rollouts: int) -> None:
        new = new_rollouts(n_rollouts)
        self._rollouts.update(rollout.id for rollout in new)
        await self._queue.enqueue(new)
        self._added.set()

    async def train(self) -> None:
        await self._added.wait()
        while True:
            done = await self._queue.done(self._rollouts)
            self._rollouts.difference_update(rollout.id for rollout in done)
            await self.add(len(done))
            await asyncio.sleep(TRAINER_INTERVAL)


async def commands() -> AsyncIterator[dict[str, Any]]:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


async def serve(path: Path, upstream: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(SqliteStore(path))
        server = LightningServer(
            store,
            Upstream((upstream,), {"default": "served"}, "upstream-key", streams=True),
            RunSettings(sampling=SamplingSection(), seed=0, timeout=600, attempts=1),
            Plugins().hook,
        )
        await stack.enter_async_context(server)
        trainer = Trainer(server.queue)
        training = asyncio.create_task(trainer.train())
        print(json.dumps({"port": int(server.base_url.rpartition(":")[2]), "key": server.worker_key}), flush=True)
        async for command in commands():
            match command:
                case {"do": "keep", "queued": queued}:
                    await trainer.add(queued)
                case {"do": "fill", "rollouts": rollouts, "turns": turns}:
                    await fill(store, rollouts, turns)
            print("{}", flush=True)
        training.cancel()


if __name__ == "__main__":
    pin(sys.argv[3:])
    run(serve(Path(sys.argv[1]), sys.argv[2]))
