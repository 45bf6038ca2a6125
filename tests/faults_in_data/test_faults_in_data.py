"""A fault in every field of what is recorded: each has one defined treatment, is counted, and breaks no weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agl_core import kinds
from agl_core.errors import StoreError
from agl_core.learning.rewards import ScoringRule
from agl_core.types import Call, Choice, CreditKind, DropReason, Ending, Episode, FinishReason, Reward, TransitionKey
from agl_server.health.rollouts import episode_metrics

from .learning_line import CONTEXT, JUDGED, PLUGINS, RULES, WAYS, Line, Way, judged, make_checkpoint
from .planted_faults import GONE, PLANTED, REFUSED, Fate, WholeEpisode, ids
from .recorded_data import Data


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cost more than they give to tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    """One tiny policy per algorithm, trained on everything that the tests make of their data."""
    return Line(make_checkpoint(tmp_path_factory.mktemp("policies") / "tiny"))


@pytest.fixture
def data() -> Data:
    return Data.sound("r")


GRPO = WAYS[0]
SOME = WAYS[::3]
"""One of each algorithm, and of returns and rewards."""


def cases() -> Iterator[Any]:
    for kind, of_kind in PLANTED.items():
        for field, faults in of_kind.items():
            for value, fate in faults:
                shown = repr(value)
                if len(shown) > 40 or type(value) is object:  # The address of an object differs between processes.
                    shown = type(value).__name__
                yield pytest.param(kind, field, value, fate, id=f"{kind.__name__}.{field}={shown}")


@pytest.mark.parametrize("kind", PLANTED)
def test_every_field_has_its_faults(kind: type) -> None:
    assert PLANTED[kind].keys() == {field.name for field in fields(kind)}
    assert all(PLANTED[kind].values())


def test_every_credit_rule_and_algorithm_is_on_the_line() -> None:
    assert {way.credit for way in WAYS} == PLUGINS.components(kinds.CREDIT).keys()
    assert {way.algorithm for way in WAYS} == PLUGINS.components(kinds.ALGORITHM).keys()


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_sound_data_are_trained_on_to_the_last(line: Line, data: Data, tmp_path: Path, way: Way) -> None:
    fates = line.learn(way, await judged(data, tmp_path))

    assert len(fates) == 12
    assert set(fates.values()) == way.sound


@pytest.mark.parametrize(("kind", "field", "value", "fate"), [*cases()])
async def test_a_fault(line: Line, tmp_path: Path, kind: type, field: str, value: Any, fate: Fate) -> None:
    data = Data.sound("r")
    data.change(kind, field, value)

    if fate == REFUSED:
        with pytest.raises(StoreError, match=r"cannot be stored|refused"):
            await judged(data, tmp_path)
        return
    groups = await judged(data, tmp_path)
    for way in SOME:
        assert_fate(line.learn(way, groups), fate, exact=way is GRPO)


def assert_fate(fates: dict[TransitionKey, str], fate: Fate, exact: bool) -> None:
    """The victim has this fate; with `exact` nothing else was dropped."""
    mine = {key: reason for key, reason in fates.items() if key.rollout not in ("r1", "r2", "r3", "r4", "r5")}
    victims = {reason for key, reason in mine.items() if not key.call.endswith("-c0")}
    match fate:
        case WholeEpisode(reason):
            assert set(mine.values()) <= {reason}
        case DropReason():
            assert victims == {fate}
        case _ if fate == GONE:
            assert not victims
        case _ if exact:
            assert victims == {""}
    if exact:
        others = [reason for key, reason in fates.items() if key not in mine]
        assert set(others) == {""}
        assert len(others) == 10


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e39, -3e38])
async def test_a_rule_that_gives_a_call_such_a_reward(
    line: Line, data: Data, tmp_path: Path, call: int, value: float
) -> None:
    def wild(episode: Episode) -> list[Reward]:
        key = episode.transitions[call].key
        return [Reward("?", 9, "wild", value if episode.rollout == "r0" else 0.0, "?", key.call, key.choice)]

    groups = await judged(data, tmp_path, [*RULES, ScoringRule("wild", wild)])

    dropped = abs(value) > 3.4e38 or math.isnan(value)
    assert groups[0][0].dropped is (DropReason.NON_FINITE if dropped else None)
    for way in SOME:
        fates = line.learn(way, groups)
        if dropped:
            assert {r for key, r in fates.items() if key.rollout == "r0"} == {"non_finite"}
            others = {r for key, r in fates.items() if key.rollout != "r0"}
            assert others <= way.sound
            assert "" in others


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_groups_that_lost_members(line: Line, data: Data, tmp_path: Path, way: Way) -> None:
    """r3 has no transition that can be trained on, and r4 none at all."""
    for number in (0, 1):
        data.attempts[number] = replace(data.attempts[number], ending=Ending.LOST)
    data.calls[:] = [replace(c, prompt_ids=None) if c.rollout == "r3" else c for c in data.calls if c.rollout != "r4"]

    groups = await judged(data, tmp_path, endings={**JUDGED, Ending.LOST: "drop"})

    reasons = {key.rollout: reason for key, reason in line.learn(way, groups).items()}
    # The batch is r5 alone: an algorithm that compares within the batch finds nothing to learn.
    assert reasons.pop("r5") in ("", "no_advantage")
    assert reasons == {"r0": "ending", "r1": "ending", "r2": "group_too_small", "r3": "no_token_ids"}


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_nothing_at_all_is_left(line: Line, data: Data, tmp_path: Path, way: Way) -> None:
    data.calls[:] = [
        replace(c, choices=(replace(c.choices[0], response_ids=ids(1, 2, 3, -1)),), effective=c.effective)
        for c in data.calls
    ]

    assert set(line.learn(way, await judged(data, tmp_path)).values()) == {"non_finite"}


async def test_a_reward_survives_the_loss_of_its_transition(line: Line, data: Data, tmp_path: Path) -> None:
    """The last call of r0 is too long for the engine; what it earned came of the call before it."""
    [way] = [way for way in WAYS if (way.algorithm, way.kind) == ("reinforce++", CreditKind.REWARD)]
    sound = await judged(data, tmp_path / "sound")
    data.change(Call, "prompt_ids", np.ones(CONTEXT, np.int32))
    fault = await judged(data, tmp_path / "fault")

    assert line.learn(way, fault)[TransitionKey("r0", 0, "r0-c1", 0)] == "too_long"
    # r_0 = -0.25 of the tool, r_1 = 0.5 + 0.125 of the end: apart, G_0 = -0.25 + 0.9 · 0.625; alone, their sum.
    assert line.returns(way, sound, "r0-c0") == pytest.approx(-0.25 + 0.9 * 0.625)
    assert line.returns(way, fault, "r0-c0") == pytest.approx(-0.25 + 0.625)


async def test_a_response_cut_by_length_is_trained_on_and_counted(line: Line, data: Data, tmp_path: Path) -> None:
    data.change(Choice, "finish_reason", FinishReason.LENGTH)

    groups = await judged(data, tmp_path)

    assert set(line.learn(GRPO, groups).values()) == {""}
    assert episode_metrics([e for group in groups for e in group])["length/truncated"] == pytest.approx(1 / 12)


@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e308])
async def test_the_metrics_of_a_step_stay_finite(data: Data, tmp_path: Path, value: float) -> None:
    data.rewards[0] = replace(data.rewards[0], value=value)
    data.rewards[1] = replace(data.rewards[1], value=value)

    episodes = [e for group in await judged(data, tmp_path) for e in group]
    metrics = episode_metrics(episodes)

    assert all(math.isfinite(value) for value in metrics.values())
    # r0 and r1 count as 0; of the others 0.25, 0.5, 1, 0.25 and 0.125 each, over six, and what tools earned.
    assert math.fsum(t.reward for e in episodes[2:] for t in e.transitions) == 3 * 0.25 - 0.25
    assert metrics["reward/mean"] == pytest.approx((2.0 + 4 * 0.125 + 0.5) / 6)
