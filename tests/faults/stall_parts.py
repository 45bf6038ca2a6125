"""A plugin file: an engine whose policy asks for a tool, in a process of its own that a test can stop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import agl_core
from agl_core import kinds
from agl_core.kinds import NoOptions, Register
from agl_core.protocols import Engine, EngineContext, Progress, UpdateResult, Upstream
from agl_core.types import Batch

SERVER = Path(__file__).with_name("stall_upstream.py")


class ApartEngine(Engine):
    """Its model server is a process; updates change nothing."""

    def __init__(self, options: NoOptions, context: EngineContext) -> None:
        self._context, self._version = context, 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> Upstream:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, SERVER, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        url = (await self._process.stdout.readline()).decode().strip()
        (self._context.run_dir / "engine.pid").write_text(str(self._process.pid))
        return Upstream((url,), {"default": "default"}, self._context.api_key)

    async def update(
        self, policy: str, batch: Batch, algorithm: str, options: Mapping[str, Any], progress: Progress | None = None
    ) -> UpdateResult:
        self._version += 1
        return UpdateResult(self._version, {}, np.zeros(len(batch)), np.ones(len(batch)), (None,) * len(batch))

    async def save(self, folder: Path) -> None: ...

    async def load(self, folder: Path) -> None: ...

    async def versions(self) -> Mapping[str, int]:
        return {"default": self._version}

    async def stats(self) -> Mapping[str, float]:
        return {}

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@agl_core.hookimpl
def register_components(register: Register) -> None:
    register(kinds.ENGINE, "apart", ApartEngine)
