"""An engine as a run uses it: its process is started, asked over HTTP, and updated with what it answered."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import httpx

import agl_algorithms.plugin
from agl_core.protocols import Engine, EngineContext, PolicySpec, UpdateResult, Upstream
from agl_core.testing.engines import Row, batch_of
from agl_core.types import Batch
from agl_torch.engine import TorchEngine
from agl_torch.options import TorchOptions

from .parts import Setup

Make: TypeAlias = Callable[[EngineContext], Engine]
ALGORITHM, OPTIONS = "grpo", {"beta": 0.0}
RATE = 1e-3


@dataclass(frozen=True)
class Replies:
    """What was asked for how many tokens, and answered."""

    questions: int
    tokens: int
    """Of a reply at most."""


@dataclass(frozen=True)
class Running:
    """A started engine with one policy."""

    engine: Engine
    upstream: Upstream

    async def rows(self, wanted: Replies) -> list[Row]:
        """Sampled replies to questions that are asked at the same time, each with a seed of its own."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=600, trust_env=False, limits=limits) as client:
            return list(await asyncio.gather(*(self._row(client, i, wanted.tokens) for i in range(wanted.questions))))

    async def _row(self, client: httpx.AsyncClient, number: int, tokens: int) -> Row:
        body = {
            "model": self.upstream.models["default"],
            "messages": [{"role": "user", "content": f"What is {number + 11} plus {7 * number + 5}? " * 6}],
            "max_tokens": tokens,
            "temperature": 1.0,
            "seed": number,
            "logprobs": True,
            "return_token_ids": True,
        }
        headers = {"authorization": f"Bearer {self.upstream.api_key}"}
        reply = await client.post(f"{self.upstream.urls[0]}/chat/completions", json=body, headers=headers)
        reply.raise_for_status()
        return Row.of_reply(reply.json(), float(number % 2))

    async def update(self, batch: Batch) -> UpdateResult:
        return await self.engine.update("default", batch, ALGORITHM, OPTIONS)

    async def batch(self, wanted: Replies) -> Batch:
        """Replies of the version that is served, as one group."""
        return batch_of(await self.rows(wanted), version=(await self.engine.versions())["default"])


def spec_of(model: Path, dtype: str, lora: dict[str, Any] | None = None, rate: float = RATE) -> PolicySpec:
    return PolicySpec(
        str(model), dtype, lora=lora, optimizer={"learning_rate": rate}, algorithm=ALGORITHM, algorithm_options=OPTIONS
    )


@asynccontextmanager
async def started(make: Make, run: Path, spec: PolicySpec) -> AsyncIterator[Running]:
    """The engine, until the block ends."""
    context = EngineContext(
        run_dir=run,
        seed=1,
        policies={"default": spec},
        deterministic=False,
        plugin_files=plugin_files(),
        api_key="the-key",
        steps=10,
    )
    engine = make(context)
    try:
        yield Running(engine, await engine.start())
    finally:
        await engine.stop()


def torch_engine(setup: Setup, device: str | None = None) -> Make:
    """The torch engine on the device that is measured, or on another."""
    options = TorchOptions.model_validate({"device": device or setup.device})
    return lambda context: TorchEngine(options, context)


def plugin_files() -> tuple[Path, ...]:
    """What an engine's process needs to find the algorithms: nothing, unless they are used from source."""
    try:
        importlib.metadata.distribution("agl-algorithms")
    except importlib.metadata.PackageNotFoundError:
        return (Path(agl_algorithms.plugin.__file__),)
    return ()
