"""Connections of the agent's HTTP client: a request polls the one that it uses, and uses none that is closed."""

from __future__ import annotations

import asyncio
import importlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("attached")


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
async def test_only_the_connection_that_is_about_to_be_used_is_polled(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, polled = library.replace("httpx", "httpcore"), 0

    def polling(readable: Any) -> Any:
        def counted(sock: Any) -> bool:
            nonlocal polled
            polled += 1
            return bool(readable(sock))

        return counted

    for backend in ("sync", "anyio"):
        module = importlib.import_module(f"{core}._backends.{backend}")
        monkeypatch.setattr(module, "is_socket_readable", polling(module.is_socket_readable))

    async with Connections() as server:

        def block() -> int:
            with importlib.import_module(library).Client(base_url=server.url, trust_env=False) as client:
                with ThreadPoolExecutor(9) as threads:
                    assert list(threads.map(lambda _: client.get("/together").status_code, range(9))) == [200] * 9
                before = polled
                assert client.get("/").status_code == 200
                return polled - before

        assert await asyncio.to_thread(block) == 1
        async with importlib.import_module(library).AsyncClient(base_url=server.url, trust_env=False) as client:
            await asyncio.gather(*(client.get("/together") for _ in range(9)))
            before = polled
            assert (await client.get("/")).status_code == 200
            assert polled - before == 1


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
async def test_connections_that_the_server_has_closed_are_not_used(library: str) -> None:
    async with Connections() as server:
        async with importlib.import_module(library).AsyncClient(base_url=server.url, trust_env=False) as client:
            await asyncio.gather(*(client.get("/together") for _ in range(9)))
            await server.hang_up()
            assert (await client.post("/", content=b"once")).status_code == 200

        def block() -> int:
            with importlib.import_module(library).Client(base_url=server.url, trust_env=False) as client:
                assert client.get("/").status_code == 200
                asyncio.run_coroutine_threadsafe(server.hang_up(), loop).result()
                return int(client.post("/", content=b"once").status_code)

        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(block) == 200


class Connections:
    """A server that answers 200 and keeps connections; to /together, once nine of its connections have asked."""

    def __init__(self) -> None:
        self._open: set[asyncio.StreamWriter] = set()
        self._together = asyncio.Barrier(9)

    async def __aenter__(self) -> Connections:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self.hang_up()

    async def hang_up(self) -> None:
        """Close every connection, and wait until the client's system has heard of it."""
        for writer in list(self._open):
            writer.close()
            await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(4 if b"POST" in head else 0)
                if b"/together" in head:
                    await self._together.wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        self._open.discard(writer)
        writer.close()
