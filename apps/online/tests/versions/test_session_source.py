"""Which sessions a step trains on, and that none is used twice or lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agl_core.training.rollouts import Drawn
from agl_core.types import Call, DropReason, Ending, Sampling

from .sessions_of_use import WaitsError, sessions


def reasons(taken: Drawn) -> dict[str, str | None]:
    return {episode.rollout: episode.dropped for episode in taken.new}


async def test_each_rewarded_session_is_used_once_the_latest_first(tmp_path: Path) -> None:
    async with sessions(tmp_path) as use:
        first, silent, second, third = [await use.end(thumbs=t) for t in (1.0, None, 0.0, 1.0)]
        taken = await use.take()
        assert await use.train(taken) == [second, third]
        assert [episode.terminal for episode in taken.new] == [0.0, 1.0]
        assert (taken.metrics["sessions/reward"], taken.metrics["sessions/waiting"]) == (0.5, 2.0)
        with pytest.raises(WaitsError):
            await use.take()
        await use.say(silent, 1.0)
        assert await use.train(await use.take()) == [first, silent], "feedback that comes late counts"


async def test_one_source_sees_feedback_that_comes_while_it_waits(tmp_path: Path) -> None:
    async with sessions(tmp_path, sessions_per_step=1) as use:
        silent = await use.end(thumbs=None)
        looks = 0

        async def between() -> None:
            nonlocal looks
            looks += 1
            if looks == 2:
                await use.say(silent, 0.0)

        assert await use.train(await use.take(use.source(between))) == [silent]


async def test_a_step_that_is_repeated_has_the_sessions_that_it_had(tmp_path: Path) -> None:
    async with sessions(tmp_path) as use:
        ids = [await use.end() for _ in range(6)]
        made = [await use.train(await use.take()) for _ in range(2)]
        use.step = use.engine_version = 0  # The learner was killed, and goes on from its first checkpoint.
        again = [await use.train(await use.take(use.source())) for _ in range(3)]
        assert again == [*made, ids[:2]]


async def test_what_cannot_be_trained_on_is_dropped_with_the_reason_and_does_not_fill_a_step(tmp_path: Path) -> None:
    def greedy(call: Call) -> Call:
        return replace(call, effective=Sampling(temperature=0.0, top_p=1.0))

    def without_ids(call: Call) -> Call:
        return replace(call, prompt_ids=None)

    async with sessions(tmp_path, max_staleness=3) as use:
        use.step, use.engine_version, use.resets = 10, 8, [[6, 4]]
        fresh = [await use.end(version=7), await use.end(version=10)]  # Those that come later are looked at first.
        expected = {
            await use.end(hours_ago=200): DropReason.STALE,
            await use.end(hours_ago=200, thumbs=None): DropReason.NO_REWARD,
            await use.end(version=5): DropReason.STALE,
            await use.end(version=None): DropReason.STALE,
            await use.end(ending=Ending.LOST): DropReason.ENDING,
            await use.end(ending=Ending.NO_CALL, thumbs=None): DropReason.ENDING,
            await use.end(version=9, call=greedy): None,
            await use.end(version=9, call=without_ids): None,
            await use.end(version=4): DropReason.STALE,
        }
        taken = await use.take()
        assert [episode.rollout for episode in taken.new[:2]] == fresh
        assert reasons(taken) == {**expected, **dict.fromkeys(fresh)}
        versions = {episode.rollout: episode.transitions[0].version for episode in taken.new[:2]}
        assert versions == {fresh[0]: 8 - 3, fresh[1]: 8}, "in the engine's numbers"


async def test_a_session_that_nobody_spoke_of_is_given_up_when_it_is_too_old(tmp_path: Path) -> None:
    async with sessions(tmp_path, sessions_per_step=1) as use:
        silent = await use.end(hours_ago=200, thumbs=None)
        source = use.source()
        with pytest.raises(WaitsError):
            await use.take(source)
        await use.end()
        taken = await use.take(use.source())
        assert reasons(taken)[silent] is DropReason.NO_REWARD


async def test_a_user_weighs_no_more_than_a_quarter(tmp_path: Path) -> None:
    async with sessions(tmp_path, sessions_per_step=8) as use:
        for number in range(8):
            await use.end(name="a-user-who-floods" if number < 4 else None)
        assert (await use.take()).weights == pytest.approx([0.5] * 4 + [1.0] * 4)


async def test_deleted_sessions_are_not_trained_on(tmp_path: Path) -> None:
    async with sessions(tmp_path, sessions_per_step=1) as use:
        gone, kept = await use.end(), await use.end()
        await use.store.erase([gone])
        assert await use.train(await use.take()) == [kept]
