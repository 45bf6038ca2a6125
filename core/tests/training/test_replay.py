"""Prioritised replay: what is drawn how often and with which weight, for how long, and what a run makes of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.builtin import buffers
from agl_core.builtin.buffers import (
    Prioritised,
    PrioritisedOptions,
    inclusion_probabilities,
    spread,
    systematic_sample,
)
from agl_core.protocols import DrawnGroup
from agl_core.types import DropReason, Episode, TrainingRecord

from .scripted_training import Bench, asking, episode, make_bench

DRAWS = 1000


@cache
def group(name: str, returns: Sequence[float] = (0.0, 1.0), versions: Sequence[int] = (0,)) -> list[Episode]:
    return [
        episode(f"{name}-m{m}", versions, terminal=terminal, group=name, member=m) for m, terminal in enumerate(returns)
    ]


def names(drawn: Sequence[DrawnGroup] | None) -> list[str]:
    return [each.episodes[0].group for each in drawn or ()]


def holding(groups: Mapping[str, Sequence[float]], **options: Any) -> Prioritised:
    """A buffer that has given out groups with these returns, once each."""
    buffer = Prioritised(PrioritisedOptions(**options))
    for name, returns in groups.items():
        buffer.add(group(name, returns))
    assert names(buffer.draw(len(groups), asking(step=1))) == list(groups)
    return buffer


def replays(groups: Mapping[str, Sequence[float]], step: int, **options: Any) -> dict[str, float]:
    """The weights of what is drawn beside one new group."""
    buffer = holding(groups, **options)
    buffer.add(group("new"))
    new, *others = buffer.draw(1, asking(step=step)) or ()
    assert (names([new]), new.weight) == (["new"], 1.0)
    return {each.episodes[0].group: each.weight for each in others}


def frequencies(groups: Mapping[str, Sequence[float]], **options: Any) -> tuple[dict[str, float], dict[str, float]]:
    """How often each group is drawn, and the mean of its weight where it is and 0 where it is not."""
    drawn: Counter[str] = Counter()
    weighed: Counter[str] = Counter()
    for step in range(DRAWS):
        found = replays(groups, step, **options)
        drawn.update(found.keys())
        weighed.update(found)
    return {name: drawn[name] / DRAWS for name in groups}, {name: weighed[name] / DRAWS for name in groups}


THREE = {"wide": (0.0, 1.0), "half": (0.0, 0.5), "quarter": (0.0, 0.25)}
"""Priorities 1/2, 1/4, 1/8."""


def test_priorities_worked_by_hand() -> None:
    assert [spread(group(name, returns)) for name, returns in THREE.items()] == [0.5, 0.25, 0.125]
    assert spread(group("uneven", (1.0, 0.0, 0.0, 0.0))) == 0.375
    assert spread(group("equal", (0.1,) * 3)) == spread(group("rounded", (0.3, 0.1 + 0.2))) == 0.0
    assert spread(group("alone", (7.0,))) == 0.0
    assert spread(group("endless", (0.0, float("inf")))) == 0.0


def test_one_of_three_is_drawn_by_its_priority_and_weighs_the_inverse() -> None:
    often, _ = frequencies(THREE)
    shares = {"wide": 4**0.6, "half": 2**0.6, "quarter": 1.0}
    total = sum(shares.values())
    assert often == pytest.approx({name: p / total for name, p in shares.items()}, abs=5 * (0.25 / DRAWS) ** 0.5)
    weights = {name: w for step in range(50) for name, w in replays(THREE, step).items()}
    assert weights == pytest.approx({name: 1 / p for name, p in shares.items()})


@pytest.mark.parametrize("ratio", [1.0, 3.0])
def test_the_corrected_sum_expects_the_same_of_every_group(ratio: float) -> None:
    """So it is, up to a constant, the sum over all of them, whatever each contributes: nothing is favoured."""
    groups = {f"g{i}": (0.0, value) for i, value in enumerate((2.0, 0.9, 0.5, 0.4, 0.1))}
    often, weighed = frequencies(groups, ratio=ratio)
    assert often["g0"] > often["g2"] > often["g4"]
    expected = sum(weighed.values()) / len(groups)
    # A weight is at most 1, so that is the most that one draw deviates by.
    assert weighed == pytest.approx(dict.fromkeys(groups, expected), abs=5 * (expected / DRAWS) ** 0.5)


@given(
    shares=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12),
    count=st.integers(1, 15),
    seed=st.integers(0, 10**6),
)
def test_as_many_as_asked_for_and_all_different(shares: list[float], count: int, seed: int) -> None:
    chances = inclusion_probabilities(np.array(shares), count)
    chosen = systematic_sample(chances, np.random.default_rng(seed))
    assert chances.sum() == pytest.approx(min(count, len(shares)))
    assert ((chances > 0) & (chances <= 1)).all()
    per_share = (chances / shares)[chances < 1]
    assert per_share == pytest.approx(np.full(len(per_share), per_share.max(initial=0.0)))
    assert len(chosen) == len(set(chosen)) == min(count, len(shares))
    assert set(np.flatnonzero(chances == 1)) <= set(chosen)


def test_what_has_nothing_to_compare_is_not_drawn_again() -> None:
    for step in range(20):
        assert replays({"equal": (1.0, 1.0), "wide": (0.0, 1.0)}, step, ratio=5.0) == {"wide": 1.0}
        assert replays({"equal": (1.0, 1.0)}, step) == {}


def test_a_group_stays_until_one_of_its_episodes_is_too_old() -> None:
    buffer = Prioritised(PrioritisedOptions(ratio=10.0))
    buffer.add([*group("mixed", (0.0,), (3, 3)), replace(group("mixed", (1.0,), (3, 1))[0], rollout="late")])
    buffer.add(group("new", versions=(3,)))
    buffer.draw(2, asking(version=3, max_staleness=2))
    seen = []
    for version in (3, 4, 5, 6):
        buffer.add(group(f"v{version}", versions=(version,)))
        seen.append(names(buffer.draw(1, asking(version=version, max_staleness=2))))
        assert len(buffer) == len(seen[-1])
    assert seen == [["v3", "mixed", "new"], ["v4", "new", "v3"], ["v5", "new", "v3", "v4"], ["v6", "v4", "v5"]]


def test_those_that_came_first_make_room_and_too_few_new_groups_are_waited_for(monkeypatch: Any) -> None:
    monkeypatch.setattr(buffers, "_CAPACITY", 2)
    buffer = Prioritised(PrioritisedOptions(ratio=10.0))
    for number in range(5):
        assert buffer.draw(1, asking()) is None
        buffer.add(group(f"g{number}"))
        assert (buffer.pending, len(buffer)) == ([f"g{number}"], min(number, 2) + 1)
        drawn = names(buffer.draw(1, asking()))
        assert drawn == [f"g{number}", *(f"g{i}" for i in range(max(0, number - 2), number))]


def test_what_was_dropped_is_dropped_once_and_a_group_that_is_too_small_is_not_replayed() -> None:
    buffer = Prioritised(PrioritisedOptions(ratio=10.0))
    dropped = replace(episode("d", group="three", member=2), dropped=DropReason.ENDING)
    empty = replace(episode("e", group="two", member=1), transitions=())
    first = [[*group("three", (0.0, 1.0)), dropped], [*group("two", (0.0, 1.0)), empty, empty], group("new")]
    for each in first:
        buffer.add(each)
    buffer.add(group("one"))
    buffer.draw(3, asking(at_least=2))
    _, *again = buffer.draw(1, asking(at_least=2)) or ()
    assert [[each.rollout for each in drawn.episodes] for drawn in again] == [
        ["new-m0", "new-m1"],
        ["three-m0", "three-m1"],
        ["two-m0", "two-m1"],
    ]
    small = Prioritised(PrioritisedOptions(ratio=10.0))
    for each in first:
        small.add(each)
    assert len(small.draw(3, asking(at_least=3)) or ()) == 3
    assert len(small) == 0


def test_the_draw_is_a_function_of_seed_step_and_groups_whichever_ended_first() -> None:
    groups = {f"g{i}": (0.0, 1.0) for i in range(20)}

    def drawn(order: Iterable[str], **asked: int) -> list[str]:
        buffer = holding({name: groups[name] for name in order}, ratio=5.0)
        buffer.add(group("new"))
        buffer.draw(2, asking(**asked))  # Asked too early, it is asked again.
        return names(buffer.draw(1, asking(**asked)))

    assert drawn(groups, seed=1, step=4) == drawn(reversed(groups), seed=1, step=4)
    assert len({tuple(drawn(groups, seed=seed, step=step)) for seed in (1, 2) for step in (3, 4)}) == 4


def replaying(folder: Path, seed: int = 0, **settings: Any) -> Bench:
    bench = make_bench(
        folder,
        buffer=Prioritised(PrioritisedOptions()),
        **{"steps": 8, "group_size": 3, "max_staleness": 3, **settings},
    )
    bench.collector.first = lambda rollout: random.Random(f"{seed}:{rollout.id}").random()
    bench.collector.reward = lambda rollout: random.Random(rollout.id).choice([0.0, 0.5, 1.0])
    return bench


@pytest.mark.parametrize("seed", range(2))
def test_a_run_trains_on_every_new_group_once_and_on_old_ones_again(tmp_path: Path, seed: int) -> None:
    bench = replaying(tmp_path, seed)
    asyncio.run(bench.trainer.train())

    training_records = [record for record in bench.store.written if isinstance(record, TrainingRecord)]
    assert len({(record.key, record.step) for record in training_records}) == len(training_records), (
        "each step uses a transition once"
    )
    assert {record.dropped for record in training_records} <= {None, DropReason.STALE}
    begun = [f"s{step + 1}-g{number}" for step in range(8) for number in range(2)]
    assert sorted(set(bench.collector.begun)) == sorted(f"{name}-m{m}" for name in begun for m in range(3))
    first_step = {record.rollout: record.step for record in reversed(training_records)}
    assert Counter(first_step.values()) == dict.fromkeys(range(1, 9), 2 * 3)
    assert [set(first_step), bench.trainer.state.groups_unfinished] == [set(bench.collector.begun), []]
    moved = {each.id: each.step for each in bench.store.written if hasattr(each, "member")}
    assert moved.items() <= first_step.items(), "a rollout is recorded with the step that first trained on it"

    assert bench.stale.isdisjoint(
        record.rollout for record in training_records if record.step > first_step[record.rollout]
    )
    replayed = Counter(record.step for record in training_records if record.step > first_step[record.rollout])
    assert sum(replayed.values()) > 0
    assert bench.metric("buffer/replayed") == [replayed[step] / (3 * 2) for step in range(1, 9)]
    assert bench.metric("rollouts") == [6.0] * 8
    assert max(bench.metric("staleness/max")) >= 3
    for step, batch in enumerate(bench.engine.batches, 1):
        weights = dict(zip((key.rollout for key in batch.keys), batch.weight_N, strict=True))
        assert all(weight == 1 for rollout, weight in weights.items() if first_step[rollout] == step)
        assert all(0 < weight <= 1 for weight in weights.values())
        assert np.all(bench.engine.batches[step - 1].version_N >= step - 1 - 3)


def test_a_run_repeats_and_a_resumed_one_begins_with_nothing_to_replay(tmp_path: Path) -> None:
    runs = [replaying(tmp_path / name) for name in "ab"]
    for bench in runs:
        asyncio.run(bench.trainer.train())
    assert runs[0].trained == runs[1].trained

    resumed = replaying(tmp_path / "c", state=replace(runs[0].trainer.state, step=4), restart=1)
    asyncio.run(resumed.trainer.train())
    assert resumed.metric("buffer/replayed")[0] == 0
    assert sum(resumed.metric("buffer/replayed")) > 0
