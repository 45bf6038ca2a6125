"""How old an episode is, and what its group is without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from agl_core.builtin.credit import identical
from agl_core.learning import PolicyCredit, make_batches, staleness, without_stale
from agl_core.types import CreditKind, DropReason, Episode

from .scripted_training import episode, transition

CREDIT = {"default": PolicyCredit("identical", identical, CreditKind.RETURN)}


@pytest.mark.parametrize(
    ("versions", "now", "expected"),
    [((5,), 5, 0), ((5, 3, 4), 5, 2), ((None, 4), 5, 1), ((None,), 5, 0), ((), 5, 0), ((0,), 9, 9)],
)
def test_an_episode_is_as_old_as_its_oldest_transition(versions: Sequence[int | None], now: int, expected: int) -> None:
    assert staleness(episode(versions=versions), {"default": now}) == expected


def test_each_transition_is_counted_in_the_versions_of_the_policy_that_answered_it() -> None:
    mixed = replace(episode(), transitions=(transition("r", 0, 7, "writer"), transition("r", 1, 2, "critic")))
    assert staleness(mixed, {"writer": 8, "critic": 2}) == 1
    assert staleness(mixed, {"writer": 8, "critic": 5}) == 3
    assert staleness(mixed, {"writer": 8}) == 1


def members(*versions: int) -> list[Episode]:
    return [episode(f"m{i}", (7, version), terminal=float(i), member=i) for i, version in enumerate(versions)]


def test_those_left_of_a_group_are_compared_with_each_other() -> None:
    [group] = without_stale([members(7, 4, 5)], {"default": 7}, max_staleness=2)
    assert [each.dropped for each in group] == [None, DropReason.STALE, None]

    prepared = make_batches([group], CREDIT, min_group_size=2)

    batch = prepared.batches["default"]
    assert {key.rollout for key in batch.keys} == {"m0", "m2"}
    assert batch.rollout_N.tolist() == [0, 0, 1, 1]
    assert {(record.rollout, record.dropped) for record in prepared.dropped} == {("m1", DropReason.STALE)}
    assert prepared.episodes_dropped == {DropReason.STALE: 1}


def test_a_group_with_too_few_left_is_dropped_whole() -> None:
    prepared = make_batches(without_stale([members(7, 4, 4)], {"default": 7}, 2), CREDIT, min_group_size=2)
    assert prepared.batches == {}
    assert prepared.episodes_dropped == {DropReason.STALE: 2, DropReason.GROUP_TOO_SMALL: 1}


def test_another_reason_comes_first() -> None:
    group = [episode("m0", (0,), dropped=DropReason.ENDING)]
    assert without_stale([group], {"default": 9}, 1)[0][0].dropped is DropReason.ENDING
