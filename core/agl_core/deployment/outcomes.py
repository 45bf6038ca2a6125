"""What the sessions came to that ran beside a canary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from agl_core.deployment.canary import Outcome
from agl_core.learning.health import answer, has_failed
from agl_core.returns import episode_return
from agl_core.store.interface import SessionStore
from agl_core.training.rollouts.collect import Collector, Scored
from agl_core.types import AttemptKey, DropReason, Ending, Mode, Rollout, RolloutState

_UNSCORED = frozenset({DropReason.NO_REWARD, DropReason.CONTRADICTED, DropReason.REWARD_FAILED, DropReason.NON_FINITE})


class Outcomes:
    """Reads them from the store; what was read before is read again only when something new was said of it."""

    def __init__(self, store: SessionStore, collector: Collector, run: str) -> None:
        self._store, self._collector, self._run = store, collector, run
        self._known: dict[str, tuple[int, float, Outcome | None]] = {}
        """By session: the feedback that was counted, when it ended, and what it came to."""
        self._before: set[str] = set()
        """Sessions that ran earlier."""

    def forget(self) -> None:
        """Another canary begins."""
        self._known.clear()
        self._before.clear()

    async def since(self, moment: float, versions: Collection[int]) -> list[Outcome]:
        """The sessions of these versions that began after this moment and have ended, in the order of their ends."""
        ended = await self._store.rollouts(run=self._run, mode=Mode.USE, state=RolloutState.DONE)
        listed = [each for each in ended if each.id not in self._before]
        said = Counter(e.rollout for e in await self._store.feedback([AttemptKey(each.id, 0) for each in listed]))
        changed: list[Rollout] = []
        ends: dict[str, float] = {}
        for each in listed:
            known = self._known.get(each.id)
            if known is not None and known[0] == said[each.id]:
                continue
            attempts = await self._store.attempts(each.id)
            if not attempts or attempts[-1].started < moment:
                self._before.add(each.id)
                continue
            ends[each.id] = attempts[-1].ended or attempts[-1].started
            changed.append(each)
        for rollout, scored in zip(changed, await self._collector.scored(changed), strict=True):
            self._known[rollout.id] = (said[rollout.id], ends[rollout.id], outcome_of(scored))
        there = {each.id for each in listed}
        found = sorted((end, id) for id, (_, end, _) in self._known.items() if id in there)
        outcomes = (self._known[id][2] for _, id in found)
        return [each for each in outcomes if each is not None and each.version in versions]


def outcome_of(scored: Scored) -> Outcome | None:
    """What one session came to; None if no version of the run answered it, or several did."""
    rollout, episode = scored.rollout, scored.episode
    versions = {t.version for t in episode.transitions}
    version = versions.pop() if len(versions) == 1 else None
    if version is None:
        return None
    results = [each for t in episode.transitions for each in t.tool_results]
    said = answer(episode)
    return Outcome(
        version=version,
        name=rollout.group,
        reward=None if episode.dropped in _UNSCORED else episode_return(episode),
        tool_errors=sum(map(has_failed, results)) / len(results) if results else 0.0,
        empty=float(said is not None and not said.strip()),
        lost=rollout.ending is Ending.LOST,
    )
