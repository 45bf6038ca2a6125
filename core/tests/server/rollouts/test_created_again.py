"""Creating a rollout again changes nothing, however long ago it ended, and whoever knows of it: memory or the store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_core.errors import ServerError, StoreError
from agl_core.server import Keys, RolloutQueue
from agl_core.store.sqlite import SqliteStore
from agl_core.testing import episodes as make
from agl_core.testing.memory_store import MemoryStore
from agl_core.testing.server import Hooks
from agl_core.types import Ending, RolloutState, Task

from ..leasing import FINISHED, lease, leased

REMEMBERED = 2


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    if request.param == "memory":
        yield MemoryStore()
    else:
        async with SqliteStore(tmp_path / "store.sqlite") as store:
            yield store


@pytest.fixture
def queue(store: Any, monkeypatch: pytest.MonkeyPatch) -> RolloutQueue:
    monkeypatch.setattr("agl_core.server.rollouts.queue._REMEMBERED", REMEMBERED)
    return made(store)


def made(store: Any) -> RolloutQueue:
    return RolloutQueue(store, timeout=30, attempts=2, hook=Hooks(), keys=Keys())


async def end(queue: RolloutQueue, *ids: str) -> None:
    for id in ids:
        await queue.enqueue([make.rollout(id)])
        await queue.close_attempt(await leased(queue, calls=1), FINISHED)


async def test_one_that_memory_has_forgotten(queue: RolloutQueue, store: Any) -> None:
    ids = [f"a{number}" for number in range(REMEMBERED + 3)]
    await end(queue, *ids)
    before = [(await store.rollout(id), await store.attempts(id)) for id in ids]
    await queue.enqueue([*map(make.rollout, ids), make.rollout("a")])
    assert queue.queued == 1, "the new one, whose id begins those of all the others"
    assert [each.rollout for each in (await lease(queue, capacity=9)).leases] == ["a"]
    assert [(await store.rollout(id), await store.attempts(id)) for id in ids] == before
    assert {each.state for each, _ in before} == {RolloutState.DONE}
    assert [each.id for each in await queue.done(ids[:1])] == ids[:1]


async def test_another_one_under_its_id_is_refused(queue: RolloutQueue, store: Any) -> None:
    await end(queue, *"abcde")
    with pytest.raises(ServerError, match="a is already in the queue"):
        await queue.enqueue([make.rollout("new"), make.rollout("a", task=Task("other", None))])
    assert queue.queued == 0
    assert (await store.rollout("a")).ending is Ending.FINISHED


async def test_one_that_training_has_moved_to_the_step_that_used_it(queue: RolloutQueue, store: Any) -> None:
    await end(queue, *"abcde")
    await store.put(*[replace(await store.rollout(id), step=7) for id in "ae"])
    after_a_restart = made(store)
    await after_a_restart.restore("run")
    for each in (queue, after_a_restart):
        await each.enqueue([make.rollout("a"), make.rollout("e")])
        assert each.queued == 0
    assert [(await store.rollout(id)).step for id in "ae"] == [7, 7]


async def test_while_the_store_cannot_be_read_nothing_is_taken_in(
    queue: RolloutQueue, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(prefix: str) -> None:
        raise StoreError("scripted failure")

    with monkeypatch.context() as broken:
        broken.setattr(store, "rollout", fails)
        with pytest.raises(StoreError):
            await queue.enqueue([make.rollout("a")])
    assert queue.queued == 0
    await queue.enqueue([make.rollout("a")])
    assert queue.queued == 1
