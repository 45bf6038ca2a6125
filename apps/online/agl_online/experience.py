"""What the learner trains on: finished sessions with a reward, each once, and beside them rollouts of tasks.

Which step a session was used in is recorded with it, in the same transaction as what the step made of it. So a learner
that is killed and goes on from an earlier checkpoint gives the steps that it repeats the sessions that they had.

    ended ──▶ waits for a reward ──▶ drawn for a step, or dropped with the reason ──▶ recorded with the step

If there are more sessions than steps take, the latest are drawn, and the others become too old.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from agl_core.learning import staleness
from agl_core.learning.batch import left_out
from agl_core.protocols import DrawContext
from agl_core.returns import episode_return
from agl_core.store.interface import ErasableStore, Wanted
from agl_core.training.experience import Drawn, Experience
from agl_core.training.metrics import Phase
from agl_core.training.rollouts import Collected, Collector, Scored, warn_of_failed_rules
from agl_core.types import AttemptKey, DropReason, Episode, Mode, Rollout, RolloutState, Transition
from agl_online.config import LearnSection

_NAME_SHARE = 0.25
"""Of the weight of a step: what sessions of one name may have together."""
_MAX_AGE = 7 * 24 * 3600.0
"""Seconds after its end that a session, rewarded or not, can be trained on."""
_AT_ONCE = 256
"""Sessions that one step drops for their age, at most."""
_LATEST = 4096
"""Sessions among which those of a step are looked for."""
_SHORTEST, _SHARE = 0.5, 20
"""Seconds between two looks, and how many times longer than a look they are at least."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The sessions of one step."""

    scored: list[Scored]
    weights: list[float]
    metrics: Mapping[str, float]


@dataclass(slots=True)
class _Seen:
    """What is known of a session that waits."""

    ended: float
    """Unix seconds."""
    said: int = -1
    """Feedback on it when it was last scored; -1: it was not scored yet."""
    found: Scored | None = None
    """None: it has no reward yet."""


class SessionSource:
    """Finds the sessions of a step. `since` says how many updates ago a version was, None for one that was given up.

    `between` is called between two looks: what else there is to do while sessions are waited for.
    """

    def __init__(
        self,
        store: ErasableStore,
        collector: Collector,
        run: str,
        settings: LearnSection,
        agents: Sequence[str],
        versions: Mapping[str, int],
        since: Callable[[int], int | None],
        between: Callable[[], Awaitable[None]],
    ) -> None:
        self._store, self._collector, self._run = store, collector, run
        self._settings, self._agents = settings, agents
        self._versions, self._since, self._between = versions, since, between
        self._seen: dict[str, _Seen] = {}

    async def take(self, step: int, phase: Phase) -> Taken:
        """The sessions that this step trains on, and those that it drops; waits until there are enough."""
        again = await self._store.rollouts(run=self._run, mode=Mode.USE, step=step)
        if again:  # A learner that was killed before its checkpoint made this step with them.
            return self._taken(await self._look(again, len(again)), 0)
        wanted = self._settings.sessions_per_step
        while True:
            started = time.monotonic()
            await self._between()
            waiting = await self._waiting()
            found = await self._look(waiting, wanted, time.time())
            usable = [each for each in found if self._is_usable(each.episode)]
            phase.advance(min(1.0, len(usable) / wanted), f"{len(usable)} of {wanted} sessions")
            if len(usable) >= wanted:
                useless = [each for each in found if not self._is_usable(each.episode)]
                return self._taken([*usable[:wanted], *useless], len(waiting))
            await asyncio.sleep(max(_SHORTEST, _SHARE * (time.monotonic() - started)))

    async def _waiting(self) -> list[Rollout]:
        """The sessions that ended and no step had: the latest, and the earliest, which are the first to be too old."""
        ended: Wanted = {"run": self._run, "mode": Mode.USE, "state": RolloutState.DONE, "step": 0}
        first: Wanted = {**ended, "limit": _AT_ONCE}
        last: Wanted = {**ended, "newest": _LATEST}
        earliest, latest = await self._store.rollouts(**first), await self._store.rollouts(**last)
        return list({each.id: each for each in (*earliest, *latest)}.values())

    async def _look(self, rollouts: Sequence[Rollout], wanted: int, before: float = math.inf) -> list[Scored]:
        """Those of these sessions that a step can take, the latest first; not many more than `wanted` usable ones.

        The latest come from versions that are nearest to the weights. Those count that ended before the moment
        `before`. What was scored is scored again when something new was said of it.
        """
        known, self._seen = self._seen, {}
        for each in rollouts:
            if each.id not in known:
                attempts = await self._store.attempts(each.id)
                known[each.id] = _Seen(attempts[-1].ended or time.time() if attempts else 0.0)
            self._seen[each.id] = known[each.id]
        said = Counter(each.rollout for each in await self._store.annotations([AttemptKey(e.id, 0) for e in rollouts]))
        latest = sorted(rollouts, key=lambda each: self._seen[each.id].ended, reverse=True)
        old = [each for each in latest if self._is_old(self._seen[each.id])][-_AT_ONCE:]
        young = [each for each in latest if not self._is_old(seen := self._seen[each.id]) and seen.ended <= before]
        found: list[Scored] = []
        for start in range(0, len(young), 2 * wanted):
            found += await self._scored(young[start : start + 2 * wanted], said)
            if sum(self._is_usable(each.episode) for each in found) >= wanted:
                break  # The others wait; in the end they are too old.
        return [*found, *await self._scored(old, said)]

    async def _scored(self, rollouts: Sequence[Rollout], said: Mapping[str, int]) -> list[Scored]:
        """Those of these sessions that a step can take; what is new, or has new feedback, is scored."""
        changed = [each for each in rollouts if self._seen[each.id].said != said[each.id]]
        for rollout, scored in zip(changed, await self._collector.scored(changed), strict=True):
            seen = self._seen[rollout.id]
            waits = scored.episode.dropped is DropReason.NO_REWARD and not self._is_old(seen)
            seen.found, seen.said = None if waits else scored, said[rollout.id]
        return [found for each in rollouts if (found := self._found(each.id)) is not None]

    def _found(self, id: str) -> Scored | None:
        """A session as a step takes it; None: it waits for a reward."""
        seen = self._seen[id]
        if seen.found is None:
            return None
        episode = seen.found.episode
        ages = [self._age(t) for t in episode.transitions]
        # The engine counts versions by its updates, sessions name them by the steps of their checkpoints.
        transitions = tuple(
            t if age is None else replace(t, version=self._versions[t.policy] - age)
            for t, age in zip(episode.transitions, ages, strict=True)
        )
        episode = replace(episode, transitions=transitions)
        is_stale = (
            self._is_old(seen) or None in ages or staleness(episode, self._versions) > self._settings.max_staleness
        )
        if episode.dropped is None and is_stale:
            episode = replace(episode, dropped=DropReason.STALE)
        return replace(seen.found, episode=episode)

    def _age(self, transition: Transition) -> int | None:
        """The updates since; None if the weights do not come from what answered."""
        if transition.version is None or transition.policy not in self._versions:
            return None
        return self._since(transition.version)

    def _is_old(self, seen: _Seen) -> bool:
        return time.time() - seen.ended > _MAX_AGE

    def _is_usable(self, episode: Episode) -> bool:
        """Whether a step has something to train on in it."""
        return episode.dropped is None and any(left_out(each, self._agents) is None for each in episode.transitions)

    def _taken(self, scored: Sequence[Scored], waiting: int) -> Taken:
        for seen in self._seen.values():
            if seen.found is not None:  # Another step reads it again: tokens would fill the memory.
                seen.found, seen.said = None, -1
        usable = [each for each in scored if self._is_usable(each.episode)]
        usable.sort(key=lambda each: self._seen[each.rollout.id].ended)
        names = [(str(each.rollout.task.metadata.get("application")), each.rollout.group) for each in usable]
        weights = capped_weights(names)
        useless = [each for each in scored if not self._is_usable(each.episode)]
        metrics = {
            "sessions/trained": float(len(usable)),
            "sessions/dropped": float(len(useless)),
            "sessions/waiting": float(max(0, waiting - len(scored))),
        }
        if usable:
            metrics["sessions/reward"] = sum(episode_return(each.episode) for each in usable) / len(usable)
            metrics["sessions/weight"] = sum(weights) / len(usable)
        return Taken([*usable, *useless], [*weights, *(1.0 for _ in useless)], metrics)


def capped_weights(names: Sequence[tuple[str, str]]) -> list[float]:
    """The weight of each session of a step, at most 1, by its application and its name.

    Sessions of one name weigh together at most a quarter of the number of sessions, so that no user outweighs the
    others; a single session may always weigh 1.

    >>> capped_weights([("a", "x"), ("a", "x"), ("a", "y"), ("b", "z")])
    [0.5, 0.5, 1.0, 1.0]
    """
    of_name = Counter(names)
    most = max(1.0, _NAME_SHARE * len(names))
    return [min(1.0, most / of_name[name]) for name in names]


class MixedExperience:
    """Each update gets the sessions of its step, each a group of one, and groups of rollouts of tasks.

    The rollouts keep the learner from forgetting the tasks.
    """

    def __init__(self, sessions: SessionSource, tasks: Experience | None) -> None:
        self._sessions, self._tasks = sessions, tasks

    @property
    def begun(self) -> int:
        return 0 if self._tasks is None else self._tasks.begun

    @property
    def unfinished(self) -> list[int]:
        return [] if self._tasks is None else self._tasks.unfinished

    async def draw(self, updates_left: int, context: DrawContext, phase: Phase) -> Drawn:
        """The groups of the next update; rollouts begin once there are enough sessions, and so are up to date."""
        taken = await self._sessions.take(context.step, phase)
        groups = [[each.episode] for each in taken.scored]
        errors = [error for each in taken.scored for error in each.reward_errors]
        warn_of_failed_rules(Collected(groups, errors))
        trained = taken.metrics["sessions/trained"]
        tasks = Drawn([]) if self._tasks is None else await self._tasks.draw(updates_left, context, phase)
        return Drawn(
            groups=[*tasks.groups, *groups],
            reward_errors=[*tasks.reward_errors, *errors],
            weights=[*tasks.weights, *taken.weights],
            new=[*tasks.new, *(episode for [episode] in groups)],
            rollouts=[*tasks.rollouts, *(each.rollout for each in taken.scored)],
            replayed=tasks.replayed,
            buffered=tasks.buffered,
            carried_over=tasks.carried_over,
            in_flight=tasks.in_flight,
            metrics=taken.metrics,
            note=f"{trained:.0f} sessions {taken.metrics.get('sessions/reward', math.nan):.3f}",
        )

    async def cancel(self) -> None:
        """Cancel running rollouts. Sessions go on."""
        if self._tasks is not None:
            await self._tasks.cancel()


def updates_since(version: int, step: int, resets: Sequence[Sequence[int]]) -> int | None:
    """The updates from a version to the learner's weights after `step`; None if they do not come from it.

    Steps count on when the weights go back to an earlier version. With a reset after step 50 to 40, the weights of step
    53 are those of step 40 after 3 updates, and come from none of the steps 41 to 50:

        … ── 39 ── 40 ── 41 ── … ── 50
                    └─────────────────── 51 ── 52 ── 53

    Each of `resets` is a pair: the step after which the weights went back, and the version that they went back to.

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
