"""Prioritised replay: what is drawn how often and with which weight, for how long, and what a run makes of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_core.builtin import buffers
from agl_core.builtin.buffers import Prioritised, PrioritisedOptions, spread
from agl_core.protocols import DrawnGroup
from agl_core.types import DropReason, Episode, TrainingRecord

from .scripted_training import Bench, asking, episode, make_bench

DRAWS = 1000
GROUPS = {f"g{i}": (0.0, value) for i, value in enumerate((2.0, 0.9, 0.5, 0.4, 0.1))}


def group(name: str, returns: Sequence[float] = (0.0, 1.0), versions: Sequence[int] = (0,)) -> list[Episode]:
    return [
        episode(f"{name}-m{m}", versions, terminal=terminal, group=name, member=m) for m, terminal in enumerate(returns)
    ]


def names(drawn: Sequence[DrawnGroup] | None) -> list[str]:
    return [group.episodes[0].group for group in drawn or ()]


def holding(groups: Iterable[list[Episode]], ratio: float = 1.0, **context: int) -> Prioritised:
    """A buffer that has given out these groups once each, and has a new one."""
    buffer, listed = Prioritised(PrioritisedOptions(ratio=ratio)), list(groups)
    for episodes in listed:
        buffer.add(episodes)
    assert names(buffer.draw(len(listed), asking(**context))) == [episodes[0].group for episodes in listed]
    buffer.add(group("new"))
    return buffer


def replays(buffer: Prioritised, **context: int) -> dict[str, DrawnGroup]:
    """The groups that are drawn beside a new one, by name."""
    new, *others = buffer.draw(1, asking(**context)) or ()
    assert (names([new]), new.weight) == (["new"], 1.0)
    return {other.episodes[0].group: other for other in others}


def test_priorities_worked_by_hand() -> None:
    assert [spread(group("g", returns)) for returns in ((0.0, 1.0), (0.0, 0.5), (1.0, 0.0, 0.0, 0.0))] == [
        0.5, 0.25, 0.375,
    ]  # fmt: skip
    assert {spread(group("g", returns)) for returns in ((0.1,) * 3, (0.3, 0.1 + 0.2), (7.0,))} == {0.0}
    assert spread(group("endless", (0.0, float("inf")))) == 0.0


@pytest.mark.parametrize("draws", [1, 3])
def test_groups_are_drawn_by_priority_and_each_has_the_same_expected_weight(draws: int) -> None:
    """So the weighted sum is, up to a constant, that over all of them: nothing is favoured."""
    groups = [group(name, returns) for name, returns in GROUPS.items()]
    drawn: Counter[str] = Counter()
    weighed: Counter[str] = Counter()
    for step in range(DRAWS):
        replayed = replays(holding(groups, ratio=draws), step=step)
        assert 1 <= len(replayed) <= draws
        drawn.update(replayed.keys())
        weighed.update({name: replay.weight for name, replay in replayed.items()})
    priorities = {name: (value / 2) ** 0.6 for name, (_, value) in GROUPS.items()}
    shares = {name: priority / sum(priorities.values()) for name, priority in priorities.items()}
    often = {name: drawn[name] / DRAWS for name in GROUPS}
    assert often == pytest.approx({name: 1 - (1 - p) ** draws for name, p in shares.items()}, abs=2.5 / DRAWS**0.5)
    expected = draws * min(shares.values())
    means = {name: weighed[name] / DRAWS for name in GROUPS}
    assert means == pytest.approx(dict.fromkeys(GROUPS, expected), abs=5 * (expected / DRAWS) ** 0.5)


def test_what_has_nothing_to_compare_is_not_drawn_again() -> None:
    wide, equal = group("wide"), group("equal", (1.0, 1.0))
    for step in range(20):
        assert {name: replay.weight for name, replay in replays(holding([wide, equal], 5.0), step=step).items()} == {
            "wide": 1.0
        }
        assert replays(holding([equal]), step=step) == {}


def test_a_group_stays_until_one_of_its_episodes_is_too_old() -> None:
    mixed = [*group("mixed", (0.0,), (3, 3)), replace(group("mixed", (1.0,), (3, 1))[0], rollout="late")]
    buffer = holding([mixed, group("old", versions=(3,))], version=3, max_staleness=2)
    buffer.draw(1, asking(version=3, max_staleness=2))  # The new one is of version 0, and never kept.
    kept = []
    for version in (3, 4, 5, 6):
        buffer.add(group(f"v{version}", versions=(version,)))
        buffer.draw(1, asking(version=version, max_staleness=2))
        kept.append(len(buffer))
    assert kept == [3, 3, 4, 3], "mixed leaves at 4; old and v3 leave at 6"


def test_those_that_came_first_make_room_and_too_few_new_groups_are_waited_for(monkeypatch: Any) -> None:
    monkeypatch.setattr(buffers, "_CAPACITY", 2)
    buffer = Prioritised(PrioritisedOptions(ratio=10.0))
    for number in range(5):
        assert buffer.draw(1, asking()) is None
        buffer.add(group(f"g{number}"))
        assert (buffer.pending, len(buffer)) == ([f"g{number}"], min(number, 2) + 1)
        first, *others = names(buffer.draw(1, asking(step=number)))
        assert first == f"g{number}"
        assert set(others) <= {f"g{number - 2}", f"g{number - 1}"}


def test_what_was_dropped_is_dropped_once_and_a_group_that_is_too_small_is_not_replayed() -> None:
    dropped = replace(episode("d", group="three", member=2), dropped=DropReason.ENDING)
    empty = replace(episode("e", group="two", member=1), transitions=())
    groups = [[*group("three"), dropped], [*group("two"), empty, empty]]
    seen: dict[str, list[str]] = {}
    for step in range(20):
        for name, drawn in replays(holding(groups, at_least=2), step=step, at_least=2).items():
            seen[name] = [member.rollout for member in drawn.episodes]
    assert seen == {"three": ["three-m0", "three-m1"], "two": ["two-m0", "two-m1"]}
    assert len(holding(groups, at_least=3)) == 1, "the new one"


def test_the_draw_is_a_function_of_seed_step_and_groups_whichever_ended_first() -> None:
    groups = [group(f"g{i}") for i in range(20)]

    def drawn(order: Iterable[list[Episode]], **context: int) -> list[str]:
        buffer = holding(order, ratio=5.0)
        assert buffer.draw(2, asking(**context)) is None  # Asked too early, it is asked again.
        return names(buffer.draw(1, asking(**context)))

    assert drawn(groups, seed=1, step=4) == drawn(reversed(groups), seed=1, step=4)
    assert len({tuple(drawn(groups, seed=seed, step=step)) for seed in (1, 2) for step in (3, 4)}) == 4


def replaying(folder: Path, **settings: Any) -> Bench:
    buffer = Prioritised(PrioritisedOptions())
    bench = make_bench(folder, buffer=buffer, **{"steps": 8, "group_size": 3, "max_staleness": 3, **settings})
    bench.collector.first = lambda rollout: random.Random(f"0:{rollout.id}").random()
    bench.collector.reward = lambda rollout: random.Random(rollout.id).choice([0.0, 0.5, 1.0])
    return bench


def test_a_run_trains_on_every_new_group_once_and_on_old_ones_again(tmp_path: Path) -> None:
    bench = replaying(tmp_path)
    asyncio.run(bench.trainer.train())

    records = [record for record in bench.store.written if isinstance(record, TrainingRecord)]
    assert len({(record.key, record.step) for record in records}) == len(records), "each step uses a transition once"
    assert {record.dropped for record in records} <= {None, DropReason.STALE}
    first_step = {record.rollout: record.step for record in reversed(records)}
    assert Counter(first_step.values()) == dict.fromkeys(range(1, 9), 2 * 3)
    assert [set(first_step), bench.trainer.state.groups_unfinished] == [set(bench.collector.begun), []]
    moved = {record.id: record.step for record in bench.store.written if hasattr(record, "member")}
    assert moved.items() <= first_step.items(), "a rollout is recorded with the step that first trained on it"

    again = [record for record in records if record.step > first_step[record.rollout]]
    assert bench.stale.isdisjoint(record.rollout for record in again)
    replayed = Counter(record.step for record in again)
    assert sum(replayed.values()) > 0
    assert bench.metric("buffer/replayed") == [replayed[step] / (3 * 2) for step in range(1, 9)]
    assert bench.metric("rollouts") == [6.0] * 8
    assert max(bench.metric("staleness/max")) >= 3
    for step, batch in enumerate(bench.engine.batches, 1):
        weights: Mapping[str, float] = dict(zip((key.rollout for key in batch.keys), batch.weight_N, strict=True))
        assert all(weight == 1 for rollout, weight in weights.items() if first_step[rollout] == step)
        assert min(weights.values()) > 0
        assert np.all(batch.version_N >= step - 1 - 3)


def test_a_run_repeats_and_a_resumed_one_begins_with_nothing_to_replay(tmp_path: Path) -> None:
    runs = [replaying(tmp_path / name) for name in "ab"]
    for bench in runs:
        asyncio.run(bench.trainer.train())
    assert runs[0].trained == runs[1].trained

    resumed = replaying(tmp_path / "c", state=replace(runs[0].trainer.state, step=4), restart=1)
    asyncio.run(resumed.trainer.train())
    assert resumed.metric("buffer/replayed")[0] == 0
    assert sum(resumed.metric("buffer/replayed")) > 0
