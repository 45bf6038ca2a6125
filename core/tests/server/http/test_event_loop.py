"""The server on the event loop that it runs on in production."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from agl_core.server.listening import run
from agl_core.store.sqlite import SqliteStore
from agl_core.testing.server import running_stack

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop does not exist there")
def test_calls_are_served_on_uvloop(tmp_path: Path) -> None:
    async def serve() -> None:
        assert type(asyncio.get_running_loop()).__module__ == "uvloop"
        async with SqliteStore(tmp_path / "store.sqlite") as store, running_stack(store=store) as stack:
            key = await stack.lease()
            async with stack.client(key) as client:
                reply = await client.chat.completions.create(model="default", messages=HELLO)
            assert [call.id for call in await store.calls([key])] == [reply.id]

    run(serve())
