"""Rollouts that are removed for good: nothing of them is left in the file, and nothing of others is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from agl_core.store.sqlite import SqliteStore
from agl_core.testing import episodes as make
from agl_core.types import Annotation, AttemptKey, Mode, Reward, RolloutState, ToolResult, ToolStatus, TrainingRecord

SHARED = {"role": "system", "content": "You answer the questions of customers."}


def asking(make_call: Any, id: str, rollout: str, text: str, **changes: Any) -> Any:
    request = {"model": "default", "messages": [SHARED, {"role": "user", "content": text}]}
    return make_call(id, rollout, request=request, **changes)


def raw(path: Path) -> bytes:
    """All that is in the store's files."""
    return b"".join(each.read_bytes() for each in path.parent.glob(f"{path.name}*"))


async def test_nothing_of_an_erased_rollout_is_left_in_the_file(path: Path, make_call: Any, exactly: Any) -> None:
    kept = asking(make_call, "b", "kept", "where is my order?")
    async with SqliteStore(path) as store:
        await store.put(
            *(make.rollout(id) for id in ("gone", "kept")),
            *(make.attempt(id, error=f"the error of {id}") for id in ("gone", "kept")),
            asking(make_call, "a", "gone", "my name is Rumpelstilzchen"),
            kept,
            ToolResult("x", "gone", 0, "look", ToolStatus.OK, result="a secret result"),
            Reward("gone", 0, "a-secret-name", 1.0, "rule"),
            TrainingRecord("gone", 0, "a", 0, 1, 1.0, 0.5, 0.25),
            Annotation("gone", 0, "f", 1.0, {"correction": "a secret correction"}),
        )
        assert b"Rumpelstilzchen" in raw(path)
        assert await store.erase(["gone", "never there"]) == 1
        left = raw(path)
        for text in (b"Rumpelstilzchen", b"the error of gone", b"secret"):
            assert text not in left, text
        key = AttemptKey("gone", 0)
        assert [each.id for each in await store.rollouts()] == ["kept"]
        for read in (store.calls, store.rewards, store.tool_results, store.training_records, store.annotations):
            assert await read([key]) == []
        assert exactly(await store.calls([kept.key])) == exactly([kept])
        assert await store.erased(["gone", "never there", "kept"]) == {"gone", "never there"}
        assert await store.erase(["gone"]) == 0
        # The shared message goes with the last call that has it.
        await store.erase(["kept"])
        assert b"customers" not in raw(path)


async def test_what_is_written_while_others_are_erased_is_whole(path: Path, make_call: Any, exactly: Any) -> None:
    """Calls share their first messages with what is being removed, and blocks of tokens too."""
    import numpy as np

    ids = np.arange(600, dtype=np.int32)

    def made(number: int) -> Any:
        return asking(make_call, f"c{number}", f"r{number}", "the same for all", prompt_ids=ids)

    async with SqliteStore(path) as store:
        await store.put(make.rollout("r0"), made(0))

        async def writing(number: int) -> None:
            await store.put(make.rollout(f"r{number}"), made(number))

        for start in range(1, 40, 4):
            await asyncio.gather(*(writing(start + i) for i in range(2)), store.erase([f"r{start - 1}"]))
            await asyncio.gather(store.erase([f"r{start}"]), *(writing(start + i) for i in range(2, 4)))
        left = {each.id for each in await store.rollouts()}
        assert len(left) > 10
        for number in range(40):
            if f"r{number}" in left:
                [call] = await store.calls([AttemptKey(f"r{number}", 0)])
                assert exactly(call) == exactly(made(number))


async def test_what_ended_before_a_moment(path: Path) -> None:
    async with SqliteStore(path) as store:
        for id, mode, state, ended in (
            ("old", Mode.USE, RolloutState.DONE, 10.0),
            ("new", Mode.USE, RolloutState.DONE, 30.0),
            ("open", Mode.USE, RolloutState.RUNNING, None),
            ("trained", Mode.TRAIN, RolloutState.DONE, 10.0),
        ):
            await store.put(make.rollout(id, mode=mode, state=state), make.attempt(id, ended=ended))
        assert await store.ended_before(Mode.USE, 20.0) == ["old"]


async def test_an_annotation_under_one_id_is_recorded_once(path: Path) -> None:
    first = Annotation("r", 0, "f", 1.0, {"reward": 0.5}, call="c")
    async with SqliteStore(path) as store:
        await store.put(first)
        await store.put(Annotation("r", 0, "f", 2.0, {"reward": 0.0}))
        await store.put(Annotation("r", 0, "g", 3.0, {"correction": [1, None]}))
        assert await store.annotations([AttemptKey("r", 0)]) == [
            first,
            Annotation("r", 0, "g", 3.0, {"correction": [1, None]}),
        ]
