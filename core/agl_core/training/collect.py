"""Rollouts go into the queue; episodes with rewards come out, in the order of the plan."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agl_core.errors import PluginError
from agl_core.learning import ScoringRule, score
from agl_core.store.interface import Store
from agl_core.training.progress import Phase
from agl_core.training.recorded import recorded_episodes
from agl_core.types import DropReason, Ending, Episode, Json, Reward, Rollout

logger = logging.getLogger(__name__)

_HEALTH_INTERVAL = 2.0


class Queue(Protocol):
    """What the trainer needs of the rollout queue, near or far."""

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None: ...

    async def next_done(self) -> Rollout: ...

    def done_now(self) -> list[Rollout]: ...

    async def cancel(self, ids: Sequence[str]) -> None: ...


@dataclass
class Collected:
    """What came back."""

    groups: list[list[Episode]]
    reward_errors: list[Exception] = field(default_factory=list)

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group]


@dataclass(frozen=True)
class Collector:
    """Runs planned rollouts and makes episodes of what was recorded."""

    store: Store
    queue: Queue
    rules: Sequence[ScoringRule]
    endings: Mapping[Ending, float | Json]
    hook: Any
    check_health: Callable[[], None]
    """Raises if a part of the run has died, so that nothing waits for ever."""

    async def collect(self, groups: Sequence[Sequence[Rollout]], phase: Phase) -> Collected:
        """Enqueue the groups and wait for all of them; cancelled, it cancels what is still out."""
        planned = {rollout.id for group in groups for rollout in group}
        waiting = set(planned)
        episodes: dict[str, Episode] = {}
        errors: list[Exception] = []
        await self.queue.enqueue([rollout for group in groups for rollout in group])
        try:
            while waiting:
                done = [r for r in await self._next_done() if r.id in waiting]
                waiting -= {rollout.id for rollout in done}
                for episode, failed in await self._episodes(done):
                    episodes[episode.rollout] = episode
                    errors += failed
                phase.advance(1 - len(waiting) / len(planned), _note(list(episodes.values())))
        finally:
            if waiting:
                await self.queue.cancel(sorted(waiting))
        if errors and all(e.dropped is DropReason.REWARD_FAILED for e in episodes.values()):
            raise PluginError(
                f"A reward rule failed on every rollout: {type(errors[0]).__name__}: {errors[0]}. Mend the rule; "
                f"the run can be resumed."
            ) from errors[0]
        for error in errors[:1]:
            logger.warning("A reward rule failed on %d rollouts, which were dropped: %r", len(errors), error)
        return Collected([[episodes[rollout.id] for rollout in group] for group in groups], errors)

    async def _next_done(self) -> list[Rollout]:
        """At least one finished rollout, and all that finished with it."""
        first = asyncio.ensure_future(self.queue.next_done())
        try:
            while not (await asyncio.wait({first}, timeout=_HEALTH_INTERVAL))[0]:
                self.check_health()
        except BaseException:
            first.cancel()
            raise
        return [first.result(), *self.queue.done_now()]

    async def _episodes(self, rollouts: Sequence[Rollout]) -> list[tuple[Episode, list[Exception]]]:
        episodes = await recorded_episodes(self.store, rollouts, self.hook)
        scored = [await score(episode, self.rules, self.endings) for episode in episodes]
        new = [reward for episode, _ in scored for reward in _given(episode)]
        if new:
            await self.store.put(*new)
        return scored


def _given(episode: Episode) -> list[Reward]:
    """The rewards that rules gave (what the agent reported is stored already)."""
    terminal = [r for r in episode.rewards if r.source != "agent"]
    return terminal + [r for t in episode.transitions for r in t.rewards]


def _note(episodes: Sequence[Episode]) -> str:
    judged = [e.terminal for e in episodes if e.terminal is not None]
    return f"reward {sum(judged) / len(judged):.3f}" if judged else ""
