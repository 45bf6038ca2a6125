"""Whatever becomes of recording, use goes on, and what was not recorded is counted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agl_core.errors import StoreError
from agl_core.types import Ending, RolloutState
from agl_online import session as of_session

from .deployed import Deployed, deployed


async def ended(use: Deployed, name: str) -> Any:
    """The session of this name, once it has ended."""
    await use.post("sessions/end", use.keys.of_application("shop"), session=name)
    while True:
        found = [each for each in await use.sessions() if each.task.metadata["session"] == name]
        if found and found[0].state is RolloutState.DONE:
            return found[0]
        await asyncio.sleep(0.01)


async def test_a_store_that_fails_costs_no_reply(use: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    await use.ask("one", "talk")

    async def failing(*records: Any) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(use.store, "put", failing)
        assert (await use.ask("two", "talk")).id
        assert (await use.ask("never written", "gone")).id
        assert (await use.say(session="talk", rewards={"thumbs": 1})).status_code == 503, (
            "feedback is not lost in silence"
        )
    await use.ask("three", "talk")
    assert use.counted("unrecorded") == 2
    session = await ended(use, "talk")
    assert session.ending is Ending.LOST, "nothing is learned from a session with holes"
    [attempt] = await use.store.attempts(session.id)
    assert attempt.error == "1 of its calls were answered and could not be recorded."
    await use.ask("whole", "next")
    assert (await ended(use, "next")).ending is Ending.FINISHED


async def test_that_a_session_has_holes_outlives_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*records: Any) -> None:
        raise StoreError("the disk is full")

    async with deployed(tmp_path) as use:
        await use.ask("one", "talk")
        with monkeypatch.context() as broken:
            broken.setattr(use.store, "put", failing)
            await use.ask("two", "talk")
        await use.ask("three", "talk")
    async with deployed(tmp_path) as use:
        await use.ask("four", "talk")
        assert (await ended(use, "talk")).ending is Ending.LOST


async def test_a_store_that_hangs_holds_no_reply_up_for_long(use: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_session, "_PATIENCE", 0.05)
    monkeypatch.setattr(of_session, "_MAX_WAITING", 2)
    released, put = asyncio.Event(), use.store.put

    async def hanging(*records: Any) -> None:
        await released.wait()
        await put(*records)

    with monkeypatch.context() as slow:
        slow.setattr(use.store, "put", hanging)
        for number in range(4):
            async with asyncio.timeout(20):
                assert (await use.ask("hello", f"talk-{number}")).id
    assert use.counted("unrecorded") == 2, "only so many may wait"
    released.set()
    while len(await use.calls()) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert [each.task.metadata["session"] for each in await use.sessions()] == ["talk-0", "talk-1"]


async def test_feedback_waits_for_a_call_that_is_still_being_written(
    use: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_session, "_PATIENCE", 0.05)
    released, put = asyncio.Event(), use.store.put

    async def hanging(*records: Any) -> None:
        await released.wait()
        await put(*records)

    monkeypatch.setattr(use.store, "put", hanging)
    reply = await use.ask("hello", "talk")
    said = asyncio.create_task(use.say(call=reply.id, rewards={"thumbs": 1}))
    done, _ = await asyncio.wait({said}, timeout=0.3)
    assert not done
    released.set()
    assert (await said).json()["new"]
