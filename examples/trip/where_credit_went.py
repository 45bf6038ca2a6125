"""Where a run's credit went: how much of its advantages fell on calls that mattered, and whether the right way.

    python examples/trip/where_credit_went.py runs/trip runs/trip-2 --steps 10

Each call pulls on the policy as hard as its share in the loss: |advantage| times weight. The oracle says of each call
what it did. A pull up on a call that brought the answer nearer, or down on one that put it out of reach, goes the
right way; the opposite goes the wrong way; a pull on a call that did not matter teaches nothing but noise.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oracle import Effect, effects
from rich.console import Console
from rich.table import Table

from agl_core.config.load import CONFIG_FILE, load
from agl_core.learning import build_episode
from agl_core.store.interface import Store
from agl_core.types import AttemptKey, Call, Episode, Mode, TrainingRecord


@dataclass(frozen=True)
class Pulls:
    """How a run's pulls were shared; each share is of the sum of all pulls, and they add up to 1."""

    calls: int
    """Calls that were trained on."""
    mattered: float
    """The share of these calls that mattered."""
    right: float
    wrong: float
    idle: float
    """On calls that did not matter."""


def pulls(judged: Iterable[tuple[Effect, TrainingRecord]]) -> Pulls:
    """Add up what training made of calls whose effect is known; those that were dropped pulled at nothing."""
    trained = [(effect, record) for effect, record in judged if record.dropped is None and record.advantage is not None]
    by_kind = {"right": 0.0, "wrong": 0.0, "idle": 0.0}
    for effect, record in trained:
        pull = (record.advantage or 0.0) * record.weight
        agrees = (pull > 0) == (effect is Effect.NEARER)
        by_kind[("right" if agrees else "wrong") if effect.mattered else "idle"] += abs(pull)
    total = sum(by_kind.values()) or 1.0
    shares = {kind: pull / total for kind, pull in by_kind.items()}
    return Pulls(len(trained), sum(e.mattered for e, _ in trained) / max(len(trained), 1), **shares)


def judge(
    episodes: Sequence[Episode], training_records: Sequence[TrainingRecord]
) -> list[tuple[Effect, TrainingRecord]]:
    """Each call's effect and what training made of it."""
    used = {record.key: record for record in training_records}
    return [
        (effect, used[transition.key])
        for episode in episodes
        for effect, transition in zip(effects(episode), episode.transitions, strict=True)
        if transition.key in used
    ]


async def episodes(store: Store, steps: int | None = None) -> list[Episode]:
    """The episodes of the first `steps` training steps (None: of all)."""
    rollouts = {
        rollout.id: rollout
        for rollout in await store.rollouts(mode=Mode.TRAIN)
        if rollout.counted_attempt is not None and (steps is None or rollout.step <= steps)
    }
    attempts = [
        attempt
        for rollout in rollouts.values()
        for attempt in await store.attempts(rollout.id)
        if attempt.attempt == rollout.counted_attempt
    ]
    calls: dict[AttemptKey, list[Call]] = {attempt.key: [] for attempt in attempts}
    for call in await store.calls(calls):
        calls[call.key].append(call)
    return [build_episode(rollouts[each.rollout], each, calls[each.key], (), ()) for each in attempts]


async def of_run(run: Path, steps: int | None = None) -> Pulls:
    """The pulls of the run in this folder."""
    async with load(run / CONFIG_FILE).store.build(run, True) as store:
        found = await episodes(store, steps)
        return pulls(judge(found, await store.training_records([AttemptKey(e.rollout, e.attempt) for e in found])))


def main() -> None:
    parser = argparse.ArgumentParser(description="How much of a run's advantages fell on calls that mattered.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs of this example")
    parser.add_argument("--steps", type=int, help="only the first so many training steps")
    options = parser.parse_args()
    table = Table("run", "calls", "that mattered", "pull: right way", "wrong way", "on calls that did not matter")
    for run in options.runs:
        found = asyncio.run(of_run(run, options.steps))
        shares = (f"{share:.0%}" for share in (found.mattered, found.right, found.wrong, found.idle))
        table.add_row(run.name, str(found.calls), *shares)
    Console().print(table)


if __name__ == "__main__":
    main()
