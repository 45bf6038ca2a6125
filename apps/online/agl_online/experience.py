"""The learner's data: finished sessions with a reward, each once, and beside them rollouts of tasks.

A session's step is recorded in the same transaction as the step's training records. So a learner that is killed and
goes on from an earlier checkpoint repeats its steps with the same sessions.

    ended ──▶ waits for a reward ──▶ drawn for a step, or dropped with the reason ──▶ recorded with the step

If there are more sessions than steps take, the latest are drawn; the others become too old.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from agl_core.learning.batch import left_out, staleness
from agl_core.store import RolloutFilter, Store
from agl_core.types import Attempt, DropReason, Mode, Rollout, RolloutState, Transition, episode_return
from agl_online.config import LearnSection
from agl_server.training.metrics import Advance
from agl_server.training.rollouts import ScoredRollout, StepGroups
from agl_server.training.session import Session

_NAME_SHARE = 0.25
"""The share of a step's weight that sessions of one name may have together."""
_MAX_AGE = 7 * 24 * 3600.0
"""Seconds after its end that a session, rewarded or not, can be trained on."""
_MAX_DROPPED = 256
"""Sessions that one step drops for their age."""
_LATEST = 4096
"""Sessions that a step looks through."""
_SHORTEST, _SHARE = 0.5, 20
"""The smallest pause between two looks: seconds, and times the length of a look."""


async def read_ended(store: Store, rollouts: Sequence[Rollout]) -> list[tuple[Rollout, Attempt, int]]:
    """These sessions by their ends, the earliest first, each with its attempt and its number of annotations."""
    by_id = {rollout.id: rollout for rollout in rollouts}
    attempts = sorted(await store.attempts(*by_id), key=lambda attempt: attempt.ended or 0.0)
    annotations = await store.annotations([attempt.key for attempt in attempts])
    judgements = Counter(annotation.rollout for annotation in annotations)
    return [(by_id[attempt.rollout], attempt, judgements[attempt.rollout]) for attempt in attempts]


@dataclass(eq=False)
class SessionExperience:
    """The groups of each step: sessions to train on, each a group of one, sessions to drop, and rollouts of tasks."""

    session: Session
    settings: LearnSection
    agents: Sequence[str]
    since: Callable[[int], int | None]
    """The updates since a version; None for one that was given up."""
    between: Callable[[], Awaitable[None]]
    """Called between two looks, while sessions are waited for."""
    _unrewarded: dict[str, int] = field(default_factory=dict, init=False)
    """Sessions without a reward, with the number of annotations when that was found."""

    async def draw(self, step: int, advance: Advance, draw_tasks: Callable[[], Awaitable[StepGroups]]) -> StepGroups:
        """The groups of a step. Rollouts of tasks begin only once there are enough sessions, so they are up to date."""
        usable, unusable, waiting = await self._take(step, advance)
        ended = [*usable, *unusable]
        weights = capped_weights([scored.rollout.group for scored in usable])
        self.session.collector.warn_of_failed_rules(ended)
        metrics = {
            "sessions/trained": float(len(usable)),
            "sessions/dropped": float(len(unusable)),
            "sessions/waiting": float(max(0, waiting - len(ended))),
        }
        if usable:
            metrics["sessions/reward"] = sum(episode_return(scored.episode) for scored in usable) / len(usable)
            metrics["sessions/weight"] = sum(weights) / len(usable)
        tasks = await draw_tasks() if self.settings.groups_of_tasks else StepGroups([])
        return replace(
            tasks,
            groups=[*tasks.groups, *([scored.episode] for scored in ended)],
            weights=[*(1.0 for _ in tasks.groups), *weights, *(1.0 for _ in unusable)],
            rollouts=[*tasks.rollouts, *(scored.rollout for scored in ended)],
            metrics={**tasks.metrics, **metrics},
            note=f"{len(usable)} sessions {metrics.get('sessions/reward', math.nan):.3f}",
        )

    async def _take(self, step: int, advance: Advance) -> tuple[list[ScoredRollout], list[ScoredRollout], int]:
        """Wait for enough sessions: those to train on, those to drop, and how many waited."""
        repeated = await self.session.collector.store.rollouts(run=self.session.run, mode=Mode.USE, step=step)
        if repeated:  # A learner that was killed before its checkpoint made this step with them.
            return *await self._look(repeated, len(repeated)), 0
        wanted = self.settings.sessions_per_step
        while True:
            started = time.monotonic()
            await self.between()
            waiting = await self._waiting()
            usable, unusable = await self._look(waiting, wanted)
            advance(min(1.0, len(usable) / wanted), f"{len(usable)} of {wanted} sessions")
            if len(usable) >= wanted:
                return usable[-wanted:], unusable, len(waiting)
            await asyncio.sleep(max(_SHORTEST, _SHARE * (time.monotonic() - started)))

    async def _waiting(self) -> list[Rollout]:
        """Ended sessions that no step had: the latest, and the earliest, which are the first to be too old."""
        ended: RolloutFilter = {"run": self.session.run, "mode": Mode.USE, "state": RolloutState.DONE, "step": 0}
        first: RolloutFilter = {**ended, "limit": _MAX_DROPPED}
        last: RolloutFilter = {**ended, "newest": _LATEST}
        store = self.session.collector.store
        earliest, latest = await store.rollouts(**first), await store.rollouts(**last)
        return list({rollout.id: rollout for rollout in (*earliest, *latest)}.values())

    async def _look(self, rollouts: Sequence[Rollout], wanted: int) -> tuple[list[ScoredRollout], list[ScoredRollout]]:
        """The latest sessions to train on, not many more than `wanted`, and those to drop, each by their ends."""
        ended = await read_ended(self.session.collector.store, rollouts)
        judgements = {rollout.id: number for rollout, _, number in ended}
        self._unrewarded = {id: self._unrewarded[id] for id in judgements if id in self._unrewarded}
        limit = time.time() - _MAX_AGE
        old = [rollout for rollout, attempt, _ in ended if (attempt.ended or 0.0) < limit]
        young = [rollout for rollout, _, _ in reversed(ended[len(old) :])]
        changed = [rollout for rollout in young if self._unrewarded.get(rollout.id) != judgements[rollout.id]]
        usable, unusable = list[ScoredRollout](), list[ScoredRollout]()
        for start in range(0, len(changed), 2 * wanted):
            for scored in await self.session.collector.scored(changed[start : start + 2 * wanted]):
                id = scored.rollout.id
                if scored.episode.dropped is DropReason.NO_REWARD:
                    self._unrewarded[id] = judgements[id]
                else:
                    session, is_usable = self._prepare(scored)
                    (usable if is_usable else unusable).append(session)
            if len(usable) >= wanted:
                break  # The others wait; in the end they are too old.
        too_old = await self.session.collector.scored(old[:_MAX_DROPPED])
        unusable += [self._prepare(scored, is_old=True)[0] for scored in too_old]
        return usable[::-1], unusable[::-1]

    def _prepare(self, scored: ScoredRollout, *, is_old: bool = False) -> tuple[ScoredRollout, bool]:
        """A session as a step takes it, and True if it has something to train on."""
        episode = scored.episode
        ages = [self._age(transition) for transition in episode.transitions]
        # The engine counts versions by its updates, sessions name them by the steps of their checkpoints.
        transitions = tuple(
            transition if age is None else replace(transition, version=self.session.versions[transition.policy] - age)
            for transition, age in zip(episode.transitions, ages, strict=True)
        )
        episode = replace(episode, transitions=transitions)
        is_stale = is_old or None in ages or staleness(episode, self.session.versions) > self.settings.max_staleness
        if episode.dropped is None and is_stale:
            episode = replace(episode, dropped=DropReason.STALE)
        trained = (left_out(transition, self.agents) is None for transition in episode.transitions)
        return replace(scored, episode=episode), episode.dropped is None and any(trained)

    def _age(self, transition: Transition) -> int | None:
        """The updates since the version that answered; None if the weights do not come from it."""
        if transition.version is None or transition.policy not in self.session.versions:
            return None
        return self.since(transition.version)


def capped_weights(names: Sequence[str]) -> list[float]:
    """The weight of each session of a step, at most 1; `names` are their `Rollout.group`.

    Sessions of one name together weigh at most a quarter of all; a single one may weigh 1.

    >>> capped_weights(["x", "x", "y", "z"])
    [0.5, 0.5, 1.0, 1.0]
    """
    of_name = Counter(names)
    most = max(1.0, _NAME_SHARE * len(names))
    return [min(1.0, most / of_name[name]) for name in names]


def updates_since(version: int, step: int, resets: Sequence[Sequence[int]]) -> int | None:
    """The updates from a version to the learner's weights after `step`; None if they do not come from it.

    Steps count on when the weights go back. After a reset (50, 40), from step 50 to version 40, step 53 is three
    updates from version 40, and comes from none of the steps 41 to 50:

        … ── 39 ── 40 ── 41 ── … ── 50
                    └─────────────────── 51 ── 52 ── 53

    >>> resets = [(50, 40)]
    >>> updates_since(38, 53, resets), updates_since(45, 53, resets), updates_since(51, 53, resets)
    (5, None, 2)
    >>> updates_since(50, 50, resets), updates_since(40, 50, resets)
    (None, 0)
    """
    passed, end, is_version = 0, step, False
    for after, to in reversed(resets):
        # A version was saved before the weights went back after its step.
        if after < end or (after == end and not is_version):
            if after < version <= end:
                return passed + end - version
            passed, end, is_version = passed + end - after, to, True
    return passed + end - version if version <= end else None
