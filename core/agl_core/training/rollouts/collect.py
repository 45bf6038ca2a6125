"""Rollouts go into the queue; episodes with rewards come out, in the order of the plan."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from agl_core.errors import PluginError
from agl_core.learning import ScoringRule, score_all, score_groups
from agl_core.learning.rewards import AGENT_SOURCE
from agl_core.run_hooks import RunHooks
from agl_core.store.interface import Store
from agl_core.training.alarms.stall import HEALTH_INTERVAL, StallWatch
from agl_core.training.progress import Phase
from agl_core.training.rollouts.episodes import recorded_episodes
from agl_core.types import DropReason, Ending, Episode, Json, Reward, Rollout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collected:
    """Groups of scored episodes, and the exceptions of reward rules."""

    groups: list[list[Episode]]
    reward_errors: list[Exception] = field(default_factory=list)

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group]


@dataclass(frozen=True)
class Scored:
    """A rollout that is done, with its scored episode."""

    rollout: Rollout
    episode: Episode
    reward_errors: list[Exception]


class Queue(Protocol):
    """Runs rollouts: the server's queue, or what stands for it where they are recorded already."""

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Add these rollouts after those that were added before."""

    async def done(self, ids: Collection[str]) -> list[Rollout]:
        """Those of `ids` that are done; waits until one is. Asking changes nothing."""

    async def cancel(self, ids: Collection[str]) -> None:
        """End these; they are done when this returns."""


class Collector:
    """Runs rollouts and makes episodes with rewards of them.

    `check_health` raises if a part of the run has died, so that no wait lasts for ever; `stall` says why one is long.
    """

    def __init__(
        self,
        store: Store,
        queue: Queue,
        rules: Sequence[ScoringRule],
        endings: Mapping[Ending, float | Json],
        hook: RunHooks,
        check_health: Callable[[], None],
        stall: StallWatch | None = None,
    ) -> None:
        self._store, self._queue, self._rules, self._endings, self._hook = store, queue, rules, endings, hook
        self._check_health, self._stall = check_health, stall

    async def collect(self, groups: Sequence[Sequence[Rollout]], phase: Phase) -> Collected:
        """Enqueue the groups and wait for all of them; if cancelled, cancel the rollouts that are not done."""
        planned = {rollout.id for group in groups for rollout in group}
        waiting = set(planned)
        found: dict[str, Scored] = {}
        await self.enqueue([rollout for group in groups for rollout in group])
        try:
            while waiting:
                for done in await self.finished(waiting):
                    waiting.discard(done.rollout.id)
                    found[done.rollout.id] = done
                note = reward_note(each.episode for each in found.values())
                phase.advance(1 - len(waiting) / len(planned), note)
        finally:
            if waiting:
                await self.cancel(waiting)
        complete = [await self.complete([found[rollout.id] for rollout in group]) for group in groups]
        collected = Collected(
            [[each.episode for each in group] for group in complete],
            [error for group in complete for each in group for error in each.reward_errors],
        )
        warn_of_failed_rules(collected)
        return collected

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Enqueue these rollouts; each has to be awaited with `finished`, or cancelled."""
        await self._queue.enqueue(rollouts)

    async def finished(self, ids: Collection[str]) -> list[Scored]:
        """Those of `ids` that are done; waits until there is one. Several callers may wait, each for its own."""
        rollouts = await self._done(ids)
        kept_waiting = set() if self._stall is None else await self._stall.finished(rollouts)
        return await self.scored(rollouts, kept_waiting)

    async def scored(self, rollouts: Sequence[Rollout], stalled: Collection[str] = ()) -> list[Scored]:
        """Rollouts that are done, with their episodes as the rules score them; the rewards are recorded.

        Those whose ids are in `stalled` are dropped without a reward.
        """
        episodes = await recorded_episodes(self._store, rollouts, self._hook)
        episodes = [replace(each, dropped=DropReason.STALLED) if each.rollout in stalled else each for each in episodes]
        scored = await score_all(episodes, self._rules, self._endings)
        await self._put([reward for episode, _ in scored for reward in _given(episode)])
        return [Scored(rollout, *found) for rollout, found in zip(rollouts, scored, strict=True)]

    async def complete(self, group: Sequence[Scored]) -> list[Scored]:
        """A complete group with the rewards of the rules that compare its rollouts."""
        scored = await score_groups([(each.episode, each.reward_errors) for each in group], self._rules, self._endings)
        known = {reward for each in group for reward in _given(each.episode)}
        await self._put([reward for episode, _ in scored for reward in _given(episode) if reward not in known])
        return [Scored(each.rollout, *found) for each, found in zip(group, scored, strict=True)]

    async def _put(self, rewards: Sequence[Reward]) -> None:
        if rewards:
            await self._store.put(*rewards)

    async def cancel(self, ids: Collection[str]) -> None:
        """End these rollouts as cancelled; they are no longer awaited."""
        await self._queue.cancel(ids)

    async def _done(self, ids: Collection[str]) -> list[Rollout]:
        asking = asyncio.ensure_future(self._queue.done(ids))
        if self._stall is not None:
            self._stall.begin()
        try:
            while not asking.done():
                began = time.monotonic()
                await asyncio.wait({asking}, timeout=HEALTH_INTERVAL)
                if self._stall is not None:
                    self._stall.slept(time.monotonic() - began)
                if not asking.done():
                    self._check_health()
                    if self._stall is not None:
                        await self._stall.look()
            return asking.result()
        finally:
            asking.cancel()


def warn_of_failed_rules(collected: Collected) -> None:
    """Warn if reward rules failed, naming rule, rollout and reason; PluginError if they failed on every rollout."""
    errors = collected.reward_errors
    if not errors:
        return
    first = f"{errors[0].__notes__[-1]} {type(errors[0]).__name__}: {errors[0]}"
    dropped = sum(e.dropped in (DropReason.REWARD_FAILED, DropReason.NON_FINITE) for e in collected.episodes)
    if dropped == len(collected.episodes):
        raise PluginError(
            f"Reward rules failed on every rollout. {first}. Fix the rule; the run can be resumed."
        ) from errors[0]
    logger.warning("Reward rules failed %d times, and %d rollouts were dropped. %s", len(errors), dropped, first)


def reward_note(episodes: Iterable[Episode]) -> str:
    """The mean reward so far, for the progress display."""
    scored = [e.terminal for e in episodes if e.terminal is not None]
    return f"reward {sum(scored) / len(scored):.3f}" if scored else ""


def _given(episode: Episode) -> list[Reward]:
    """The rewards of rules (those that the agent reported are already stored)."""
    terminal = [r for r in episode.rewards if r.source != AGENT_SOURCE]
    return terminal + [r for t in episode.transitions for r in t.rewards]
