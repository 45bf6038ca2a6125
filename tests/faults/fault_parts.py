"""A plugin file: the parts of a run that can be checked to the last sample.

The engine's weights are a ledger of the transitions that it was trained on, saved and restored with each checkpoint:
what shaped the weights at the end is what the last checkpoint's ledger says.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

import agl_core
from agl_core import kinds
from agl_core.capture.requests import HEADER_POLICY
from agl_core.kinds import Register
from agl_core.protocols import Engine, EngineContext, Progress, UpdateResult, Upstream
from agl_core.testing.scripts import Drop, Fail, Hold, Raw, Say
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import Batch, Episode, Logprobs, Task, Tokens
from agl_server.server import LightningServer
from agl_server.training import run
from agl_server.training.loop import Trainer

LEDGER = "ledger.json"
"""In a checkpoint: by update, the keys and the checksum of each transition that it trained on."""

_UPDATE_SECONDS = 0.05
_SCRIPTED = 20_000


class LedgerOptions(BaseModel):
    """The model server's fault."""

    model_config = ConfigDict(extra="forbid")

    seed: int = 0
    failing: float = 0.0
    """The share of requests that it fails, each in one of many ways."""
    breaking: float = 0.0
    """The share of the connections to it that break."""


class LedgerEngine(Engine):
    """Serves a scripted upstream; an update writes its batch into the ledger."""

    def __init__(self, options: LedgerOptions, context: EngineContext) -> None:
        self._options, self._context = options, context
        self._upstream = ScriptedUpstream()
        self._proxy: Any = None
        self._ledger: list[list[Any]] = []
        self._version = 0

    async def start(self) -> Upstream:
        await self._upstream.__aenter__()
        options, url = self._options, self._upstream.url
        if options.failing:
            self._upstream.script(*_failing(random.Random(options.seed), options.failing))
        if options.breaking:
            # Here agl has loaded this file by its path, and its folder is where modules are found.
            from fault_proxy import FaultyProxy

            self._proxy = FaultyProxy(url, random.Random(options.seed), options.breaking)
            url = self._proxy.start()
        self._publish(0)
        return Upstream((url,), {"default": "default"}, self._context.api_key)

    async def update(self, policy: str, batch: Batch, progress: Progress | None = None) -> UpdateResult:
        await asyncio.sleep(_UPDATE_SECONDS)
        self._ledger.append([[*key, _checksum_in(batch, row)] for row, key in enumerate(batch.keys)])
        self._publish(self._version + 1)
        return UpdateResult(self._version, {}, np.zeros(len(batch)), np.ones(len(batch)), (None,) * len(batch))

    async def save(self, folder: Path) -> None:
        (folder / LEDGER).write_text(json.dumps({"version": self._version, "updates": self._ledger}))

    async def load(self, folder: Path) -> None:
        saved = json.loads((folder / LEDGER).read_text())
        self._ledger = saved["updates"]
        self._publish(saved["version"])

    async def versions(self) -> Mapping[str, int]:
        return {"default": self._version}

    async def stop(self) -> None:
        if self._proxy is not None:
            await asyncio.to_thread(self._proxy.stop)
        await self._upstream.__aexit__()

    def _publish(self, version: int) -> None:
        self._version = version
        self._upstream.headers = {HEADER_POLICY: str(version)}


def checksum(prompt_ids: Tokens, response_ids: Tokens, logprobs: Logprobs) -> int:
    """Of everything that a transition is trained on."""
    return zlib.crc32(b"|".join(array.tobytes() for array in (prompt_ids, response_ids, logprobs)))


def _checksum_in(batch: Batch, row: int) -> int:
    tokens = batch.tokens_T[batch.offsets[row] : batch.offsets[row + 1]]
    length = batch.prompt_lengths_N[row]
    logprobs = batch.behaviour_logprobs_R[batch.response_offsets[row] : batch.response_offsets[row + 1]]
    return checksum(tokens[:length], tokens[length:], logprobs)


def _failing(chance: random.Random, share: float) -> list[Any]:
    """Replies of a server that fails this share of its requests; hanging is the rarest of its ways."""

    def failure() -> Any:
        endings = [
            Fail(429),
            Fail(500),
            Fail(503, "<html>Service Unavailable</html>"),
            Raw(b"<html>all is well</html>"),
            Raw(b'{"choices": [{"index": 0, "mess'),
            Raw(bytes(chance.randbytes(200))),
            Drop(),
        ]
        return Hold() if chance.random() < 0.05 else chance.choice(endings)

    return [failure() if chance.random() < share else Say(f"reply {number}") for number in range(_SCRIPTED)]


class _NoAlgorithm:
    """A method that the ledger engine never needs."""


class _Counting:
    """Tasks without end, numbered as they are planned."""

    size = None

    def task(self, index: int) -> Task:
        return Task(str(index), index)


@agl_core.reward_rule
def parity(episode: Episode) -> float:
    return float(zlib.crc32(episode.rollout.encode()) % 2)


@agl_core.hookimpl
def register_components(register: Register) -> None:
    """Bring the parts. A lease of seconds; and no fault that is meant ends the run, or keeps it from beginning."""
    lease = float(os.environ.get("AGL_FAULTS_LEASE", "3"))
    LightningServer.__init__ = functools.partialmethod(LightningServer.__init__, lease=lease)  # type: ignore[assignment]
    Trainer.stops_without_data = False
    run._look = lambda *_: asyncio.sleep(0)  # type: ignore[assignment]
    register(kinds.ENGINE, "ledger", LedgerEngine, options=LedgerOptions)
    register(kinds.ALGORITHM, "none", lambda options: _NoAlgorithm())
    register(kinds.TASK_SOURCE, "counting", lambda options, folder, seed: _Counting())
