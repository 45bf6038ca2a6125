"""Serving policies without a trainer: an engine, the versions that are served, and the server before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from agl_core.server.listening import Listening
from agl_online.policies.engines import Source, log_folder
from agl_online.policies.gateway import PolicyServer, check_key
from agl_online.policies.shelf import Shelf, wanted_of

INTERVAL = 1.0
"""Seconds between two looks at what names mean now."""


class Serving:
    """Policies that are being served."""

    def __init__(self, server: PolicyServer, shelf: Shelf) -> None:
        self.server, self.shelf = server, shelf

    async def follow(self) -> None:
        """Serve what the names mean, as it changes, for ever. EngineError once the engine is lost."""
        while True:
            await asyncio.sleep(INTERVAL)
            await self.shelf.engine.versions()
            await self.shelf.refresh()


@asynccontextmanager
async def serving(
    names: Sequence[str],
    *,
    host: str,
    port: int,
    key: str | None,
    say: Callable[[str], None],
    engine: str | None = None,
    overrides: Sequence[str] = (),
) -> AsyncIterator[Serving]:
    """Serve versions of policies until the block ends; an AglError says why it cannot begin.

    One engine holds them all: `engine`, by default that of the first policy's run. `overrides` are `KEY=VALUE` texts
    for the configurations of the runs.
    """
    check_key(host, key)
    wanted = wanted_of(names)
    sources = {each.reference.run: Source.of(each.reference.run, overrides) for each in wanted}
    for each in wanted:
        if each.required:
            each.reference.resolve()  # A mistake is found before an engine is started.
    async with AsyncExitStack() as stack:
        listening = Listening(host, port)  # Before the engine is started, which takes long.
        stack.callback(listening.close)
        log = stack.enter_context(log_folder())
        built = next(iter(sources.values())).engine(log, engine)
        stack.push_async_callback(built.stop)
        upstream = await built.start()
        shelf = Shelf(built, wanted, sources, say)
        await shelf.refresh()
        server = PolicyServer(shelf, upstream, listening, key)
        await server.start()
        stack.push_async_callback(server.stop)
        yield Serving(server, shelf)
