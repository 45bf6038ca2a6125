"""What a worker or trainer says of a server that fails some of what it is asked: once, and once that it is over."""

from __future__ import annotations

import asyncio
import logging

import pytest

from agl_core.client.http import FailingError, UnreachableError
from agl_core.client.link import Link, persistently

NO_SPACE = FailingError("http://server answered 503: The store cannot grow: the disk is full.")


async def test_a_server_with_a_full_disk_is_not_back_because_it_takes_heartbeats(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link, heartbeats, is_full = Link("http://server"), object(), True

    async def write() -> str:
        if is_full:
            raise NO_SPACE
        return "written"

    with caplog.at_level(logging.WARNING):
        writing = [asyncio.create_task(persistently(link, write)) for _ in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
            link.worked(heartbeats)
            await persistently(link, lambda: asyncio.sleep(0))
        assert caplog.messages == [f"{NO_SPACE} Trying again until it answers."]
        is_full = False
        assert await asyncio.gather(*writing) == ["written"] * 3
    [_, told] = caplog.messages
    assert told.startswith("The Lightning Server at http://server is back after ")


async def test_who_gives_up_or_is_cancelled_keeps_no_server_gone(caplog: pytest.LogCaptureFixture) -> None:
    link = Link("http://server")

    async def fail() -> None:
        raise NO_SPACE

    with caplog.at_level(logging.WARNING):
        with pytest.raises(UnreachableError):
            await persistently(link, fail, lambda: True)
        waiting = asyncio.create_task(persistently(link, fail))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await persistently(link, lambda: asyncio.sleep(0))
    assert [("is back" in told) for told in caplog.messages] == [False, True]
