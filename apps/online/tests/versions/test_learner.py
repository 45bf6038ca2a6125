"""Which sessions a step trains on, and what becomes of versions: none answers that did not pass."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest

from agl_core.types import Call, DropReason, Ending, Sampling
from agl_online.versions import DecidedBy, Decision, State
from agl_server.testing import until
from agl_server.training.rollouts import StepGroups

from .scripted_learner import KilledError, WaitsError, World, sessions, world


async def each_session_was_used_once(world_: World) -> None:
    used = await world_.used()
    assert used
    assert all(len(set(steps)) == 1 for steps in used.values()), used
    trained = [sorted({key.rollout for key in batch.keys}) for batch in world_.engine.batches]
    assert len({session for batch in trained for session in batch}) == sum(map(len, trained))


async def test_a_version_that_is_as_good_becomes_stable(tmp_path: Path) -> None:
    async with world(tmp_path, live=lambda version: 0.5 if version == 0 else 1.0) as w:
        await w.train(20)
        first = [d for d in w.decisions if d[0] <= 4]
        assert first == [(0, "stable"), (4, "candidate"), (4, "passed"), (4, "canary"), (4, "stable")]
        assert w.ledger.current().stable not in (None, 0)
        assert w.engine.made_by == list(range(1, 21)), "no update was given up"
        await each_session_was_used_once(w)


async def test_weights_that_the_gate_rejects_go_back_and_steps_go_on(tmp_path: Path) -> None:
    async with world(tmp_path, tested=lambda made_by: 0.5 - 0.1 * len(made_by)) as w:
        await w.train(9)
        assert w.decisions == [(0, "stable"), (4, "candidate"), (4, "rejected"), (8, "candidate"), (8, "rejected")]
        assert w.learner.state.step == 9
        assert w.engine.made_by == [9]
        assert w.learner.state.resets == [[4, 0], [8, 0]]
        await each_session_was_used_once(w)


async def test_after_the_last_step_sessions_are_answered_and_the_canary_is_decided_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_online.learner._LOOK", 0.0)
    live = {0: 0.5}
    async with world(tmp_path, serves_on=True, live=lambda version: live.get(version, 1.0)) as w:
        learning = asyncio.create_task(w.train(4))
        await until(lambda: w.decisions[-1:] == [(4, "stable")])
        assert (4, "canary") in w.decisions
        answered = w.ended
        await until(lambda: w.ended > answered)
        assert (learning.done(), w.learner.state.step) == (False, 4)
        learning.cancel()
        await asyncio.wait({learning})


@pytest.mark.parametrize("decision", ["candidate", "rejected", "passed", "canary", "rolled_back", "stable"])
async def test_a_learner_that_is_killed_after_any_decision_goes_on(tmp_path: Path, decision: str) -> None:
    killed = 0

    def kill(state: str) -> bool:
        nonlocal killed
        killed += state == decision
        return state == decision and killed == 1

    bad = {"rejected": 0.1, "rolled_back": 0.5}
    async with world(
        tmp_path,
        tested=lambda made_by: 0.5 if len(made_by) != 4 else bad.get(decision, 0.5),
        live=lambda version: 0.1 if (version == 4) is (decision == "rolled_back") else 1.0,
        kill=kill,
    ) as w:
        with pytest.raises(KilledError):
            await w.train(20)
        w.kill = lambda state: False
        await w.train(20)
        assert w.learner.state.step == 20
        last = dict(w.decisions)
        assert last[4] not in ("candidate", "passed")
        assert (4 in w.engine.made_by) is (decision not in bad), w.decisions
        used = await w.used()
        assert all(len(set(steps)) == 1 for steps in used.values())


async def test_a_version_that_went_too_far_is_rejected(tmp_path: Path) -> None:
    async with world(tmp_path, learn={}) as w:
        w.drift = -3.0
        await w.train(4)
        last = w.ledger.decisions()[-1]
        assert (last.step, last.state) == (4, State.REJECTED)
        assert last.figures["eval/sampled/kl"] == pytest.approx(math.exp(-3) - 1 + 3)
        assert "2.050 nats per token" in last.reason


async def test_an_operator_who_rolls_back_is_followed(tmp_path: Path) -> None:
    async with world(tmp_path, learn={"canary": {"share": 0.0}}) as w:
        await w.train(5)
        assert w.ledger.current().stable == 4
        w.ledger.record(Decision(4, State.ROLLED_BACK, DecidedBy.OPERATOR, "by hand"))
        await w.train(7)
        assert w.ledger.current().stable == 0
        assert w.engine.made_by == [6, 7]


async def test_the_weights_stay_if_the_stable_version_comes_from_one_that_was_given_up(tmp_path: Path) -> None:
    async with world(tmp_path, learn={"canary": {"share": 0.0}}) as w:
        await w.train(9)
        assert w.ledger.current().stable == 8
        for step, state in ((4, State.STABLE), (4, State.ROLLED_BACK)):
            w.ledger.record(Decision(step, state, DecidedBy.OPERATOR, "by hand"))
        assert w.ledger.current().stable == 8
        await w.train(11)
        assert w.learner.state.resets == []
        assert w.engine.made_by == list(range(1, 12))


def reasons(taken: StepGroups) -> dict[str, str | None]:
    return {episode.rollout: episode.dropped for episode in taken.episodes}


async def test_each_rewarded_session_is_used_once_the_latest_first(tmp_path: Path) -> None:
    async with sessions(tmp_path) as use:
        first, silent, second, third = [await use.end(thumbs=t) for t in (1.0, None, 0.0, 1.0)]
        taken = await use.take()
        assert await use.train(taken) == [second, third]
        assert [episode.terminal for episode in taken.episodes] == [0.0, 1.0]
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
        used = [await use.train(await use.take()) for _ in range(2)]
        use.step = use.engine_version = 0  # The learner was killed, and goes on from its first checkpoint.
        again = [await use.train(await use.take(use.source())) for _ in range(3)]
        assert again == [*used, ids[:2]]


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
        assert [episode.rollout for episode in taken.episodes[:2]] == fresh
        assert reasons(taken) == {**expected, **dict.fromkeys(fresh)}
        versions = {episode.rollout: episode.transitions[0].version for episode in taken.episodes[:2]}
        assert versions == {fresh[0]: 8 - 3, fresh[1]: 8}, "in the engine's numbers"


async def test_a_user_weighs_no_more_than_a_quarter(tmp_path: Path) -> None:
    async with sessions(tmp_path, sessions_per_step=8) as use:
        for number in range(8):
            await use.end(name="a-user-who-floods" if number < 4 else None)
        assert (await use.take()).weights == pytest.approx([0.5] * 4 + [1.0] * 4)
