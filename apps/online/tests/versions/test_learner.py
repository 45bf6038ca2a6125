"""What becomes of versions: none answers that did not pass, and the weights go back when one is given up."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from agl_core.testing.server import until
from agl_online.versions import By, Decision, State

from .scripted_learner import KilledError, World, world


async def each_session_was_used_once(made: World) -> None:
    used = await made.used()
    assert used
    assert all(len(set(steps)) == 1 for steps in used.values()), used
    trained = [sorted({key.rollout for key in batch.keys}) for batch in made.engine.batches]
    assert len({each for batch in trained for each in batch}) == sum(map(len, trained))


async def test_a_version_that_is_as_good_becomes_stable(tmp_path: Path) -> None:
    async with world(tmp_path, live=lambda version: 0.5 if version == 0 else 1.0) as made:
        await made.train(40)
        first = [each for each in made.decisions if each[0] <= 4]
        assert first == [(0, "stable"), (4, "candidate"), (4, "passed"), (4, "canary"), (4, "stable")]
        assert made.ledger.current().stable not in (None, 0)
        assert made.engine.made_by == list(range(1, 41)), "no update was given up"
        await each_session_was_used_once(made)


async def test_weights_that_the_gate_rejects_go_back_and_steps_go_on(tmp_path: Path) -> None:
    async with world(tmp_path, tested=lambda made_by: 0.5 - 0.1 * len(made_by)) as made:
        await made.train(9)
        assert made.decisions == [(0, "stable"), (4, "candidate"), (4, "rejected"), (8, "candidate"), (8, "rejected")]
        assert made.learner.state.step == 9
        assert made.engine.made_by == [9]
        assert made.learner.state.resets == [[4, 0], [8, 0]]
        await each_session_was_used_once(made)


async def test_a_canary_that_users_like_less_is_rolled_back(tmp_path: Path) -> None:
    async with world(tmp_path, live=lambda version: 1.0 if version == 0 else 0.1) as made:
        await made.train(30)
        outcome = [state for step, state in made.decisions if step == 4]
        assert outcome == ["candidate", "passed", "canary", "rolled_back"]
        assert made.ledger.current().stable == 0
        assert not set(made.engine.made_by) & set(range(1, 5))
        await each_session_was_used_once(made)


async def test_after_the_last_step_sessions_are_answered_and_the_canary_is_decided_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_online.learner._LOOK", 0.0)
    live = {0: 0.5}
    async with world(tmp_path, serves_on=True, live=lambda version: live.get(version, 1.0)) as made:
        learning = asyncio.create_task(made.train(4))
        await until(lambda: made.decisions[-1:] == [(4, "stable")])
        assert (4, "canary") in made.decisions
        answered = made.ended
        await until(lambda: made.ended > answered)
        assert (learning.done(), made.learner.state.step) == (False, 4)
        learning.cancel()
        await asyncio.wait({learning})


async def test_without_a_canary_what_passes_answers_at_once(tmp_path: Path) -> None:
    async with world(tmp_path, learn={"canary": {"share": 0.0}}) as made:
        await made.train(4)
        assert made.decisions[-2:] == [(4, "passed"), (4, "stable")]


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
    ) as made:
        with pytest.raises(KilledError):
            await made.train(20)
        made.kill = lambda state: False
        await made.train(20)
        assert made.learner.state.step == 20
        last = dict(made.decisions)
        assert last[4] not in ("candidate", "passed")
        assert (4 in made.engine.made_by) is (decision not in bad), made.decisions
        used = await made.used()
        assert all(len(set(steps)) == 1 for steps in used.values())


async def test_a_version_that_went_too_far_is_rejected(tmp_path: Path) -> None:
    async with world(tmp_path, learn={}) as made:
        made.drift = -3.0
        await made.train(4)
        last = made.ledger.decisions()[-1]
        assert (last.step, last.state) == (4, State.REJECTED)
        assert last.figures["eval/sampled/kl"] == pytest.approx(math.exp(-3) - 1 + 3)
        assert "2.050 nats per token" in last.reason


async def test_an_operator_who_rolls_back_is_followed(tmp_path: Path) -> None:
    async with world(tmp_path, learn={"canary": {"share": 0.0}}) as made:
        await made.train(5)
        assert made.ledger.current().stable == 4
        made.ledger.record(Decision(4, State.ROLLED_BACK, By.OPERATOR, "by hand"))
        await made.train(7)
        assert made.ledger.current().stable == 0
        assert made.engine.made_by == [6, 7]
