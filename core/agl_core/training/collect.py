"""Rollouts go into the queue; episodes with rewards come out, in the order of the plan.

Analysis too reads recorded rollouts as episodes by what is here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from agl_core.config import ScoredConfig
from agl_core.errors import PluginError, StoreRefusedError
from agl_core.learning import ScoringRule, build_episode, score_all, score_groups
from agl_core.learning.feedback import users_said
from agl_core.learning.rewards import AGENT_SOURCE, RECORDED_SOURCES, reported
from agl_core.run_hooks import RunHooks
from agl_core.store.interface import SessionStore, Store
from agl_core.training.report import Phase
from agl_core.training.stall import StallWatch
from agl_core.types import (
    AttemptKey,
    Call,
    DropReason,
    Ending,
    Episode,
    Feedback,
    Json,
    Mode,
    Reward,
    Rollout,
    ToolResult,
    TrainingRecord,
)

if TYPE_CHECKING:
    from agl_core.training.serving import Queue  # It imports the server, which analysis does without.

Recorded = TypeVar("Recorded", Call, ToolResult, Reward, TrainingRecord, Feedback)

logger = logging.getLogger(__name__)

_HEALTH_INTERVAL = 2.0


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
        if self._stall is not None:
            self._stall.finished(rollouts)
        return await self.scored(rollouts)

    async def scored(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """Rollouts that are done, with their episodes as the rules score them; the rewards are recorded."""
        episodes = await recorded_episodes(self._store, rollouts, self._hook)
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
                await asyncio.wait({asking}, timeout=_HEALTH_INTERVAL)
                if not asking.done():
                    self._check_health()
                    if self._stall is not None:
                        await self._stall.look()
            return asking.result()
        finally:
            asking.cancel()


def warn_of_failed_rules(collected: Collected) -> None:
    """Warn if reward rules failed; PluginError if they failed on every rollout."""
    errors = collected.reward_errors
    if errors and all(e.dropped is DropReason.REWARD_FAILED for e in collected.episodes):
        raise PluginError(
            f"A reward rule failed on every rollout: {type(errors[0]).__name__}: {errors[0]}. Mend the rule; "
            f"the run can be resumed."
        ) from errors[0]
    for error in errors[:1]:
        dropped = sum(e.dropped is DropReason.REWARD_FAILED for e in collected.episodes)
        logger.warning("Reward rules failed %d times, and %d rollouts were dropped: %r", len(errors), dropped, error)


def reward_note(episodes: Iterable[Episode]) -> str:
    """The mean reward so far, for the progress display."""
    scored = [e.terminal for e in episodes if e.terminal is not None]
    return f"reward {sum(scored) / len(scored):.3f}" if scored else ""


def _given(episode: Episode) -> list[Reward]:
    """The rewards of rules (those that the agent reported are already stored)."""
    terminal = [r for r in episode.rewards if r.source not in RECORDED_SOURCES]
    return terminal + [r for t in episode.transitions for r in t.rewards]


async def recorded_episodes(store: Store, rollouts: Sequence[Rollout], hook: RunHooks) -> list[Episode]:
    """The episode of each rollout's counted attempt, as the `episode_built` hooks leave it, not yet scored.

    It has the recorded rewards that the agent reported, and what users said; rules compute theirs again. A rollout
    without a counted attempt (it was cancelled, or its worker was lost) is an episode dropped for its ending.
    StoreRefusedError if calls of a rollout were pruned.
    """
    keys = counted_attempts(rollouts)
    recorded = await store.calls(keys)
    pruned = next((call.rollout for call in recorded if call.pruned), None)
    if pruned is not None:
        raise StoreRefusedError(
            f"The calls of rollout {pruned} were pruned (`agl runs prune`): their texts and tokens are gone, so "
            f"nothing is left to score. Choose a later step."
        )
    calls = by_rollout(recorded)
    tool_results = by_rollout(await store.tool_results(keys))
    rewards = by_rollout([r for r in await store.rewards(keys) if r.source == AGENT_SOURCE])
    feedback = by_rollout(await store.feedback(keys)) if isinstance(store, SessionStore) else {}
    attempts = {attempt.key: attempt for attempt in await store.attempts(*(each.id for each in rollouts))}
    episodes = []
    for rollout in rollouts:
        attempt = attempts.get(AttemptKey(rollout.id, rollout.counted_attempt or 0))
        if attempt is None or rollout.counted_attempt is None:
            episodes.append(_lost(rollout))
            continue
        episode = build_episode(
            rollout,
            attempt,
            calls.get(rollout.id, ()),
            tool_results.get(rollout.id, ()),
            rewards.get(rollout.id, ()),
            feedback.get(rollout.id, ()),
        )
        episodes.append(hook.episode_built(episode))
    return episodes


def scoring_rules(loaded: ScoredConfig) -> list[ScoringRule]:
    """The reward rules of a run.

    Of tasks that no rule scores, the reward is what the agent itself reported; of sessions, what users said.
    """
    sessions = frozenset({Mode.USE})
    tasks = frozenset(Mode) - sessions
    modes = {"tasks": tasks, "sessions": sessions, "both": tasks | sessions}
    rules = [
        ScoringRule(name, chosen.build(), section.weight, modes[section.scores])
        for name, chosen in loaded.rewards.items()
        for section in [loaded.config.rewards[name]]
    ]
    scored = frozenset[Mode]().union(*(rule.modes for rule in rules))
    defaults = [ScoringRule("reported", reported, modes=tasks), ScoringRule("users", users_said, modes=sessions)]
    return [*rules, *(each for each in defaults if not each.modes & scored)]


def counted_attempts(rollouts: Iterable[Rollout]) -> list[AttemptKey]:
    """The attempt of each rollout that counts; none of a rollout that has no such attempt."""
    return [AttemptKey(r.id, r.counted_attempt) for r in rollouts if r.counted_attempt is not None]


def by_rollout(records: Sequence[Recorded]) -> dict[str, list[Recorded]]:
    """Records grouped by their rollout, in their order."""
    grouped: dict[str, list[Recorded]] = {}
    for record in records:
        grouped.setdefault(record.rollout, []).append(record)
    return grouped


def _lost(rollout: Rollout) -> Episode:
    return Episode(
        rollout=rollout.id,
        attempt=0,
        group=rollout.group,
        member=rollout.member,
        task=rollout.task,
        mode=rollout.mode,
        ending=rollout.ending or Ending.CANCELLED,
        transitions=(),
        dropped=DropReason.ENDING,
        step=rollout.step,
    )
