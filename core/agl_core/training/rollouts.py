"""Rollouts: which ones a run makes, and the episodes with rewards that come of them.

plan ──▶ queue ──▶ workers run the agent ──▶ records ──▶ episodes ──▶ reward rules ──▶ scored
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from agl_core.config import LoadedConfig
from agl_core.config.models import EvalSection
from agl_core.errors import PluginError, StoreRefusedError
from agl_core.learning import ScoringRule, build_episode, score_all, score_groups
from agl_core.learning.rewards import AGENT_SOURCE, reported
from agl_core.plugins import RunHooks
from agl_core.protocols import RecordedTasks, TaskSource
from agl_core.store.interface import ErasableStore, Store
from agl_core.training.alarms import Alarm
from agl_core.training.failures import StallWatch, common_failure, failures
from agl_core.training.metrics import Observer, Phase, episode_metrics
from agl_core.types import (
    Annotation,
    AttemptKey,
    Call,
    DropReason,
    Ending,
    Episode,
    Json,
    Mode,
    Reward,
    Rollout,
    ToolResult,
    TrainingRecord,
)

Recorded = TypeVar("Recorded", Call, ToolResult, Reward, TrainingRecord, Annotation)
logger = logging.getLogger(__name__)

HEALTH_INTERVAL = 2.0
"""Seconds between two looks at the parts of the run."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The groups of training, by position (0, 1, …): of seed and position alone, so a resumed run repeats them."""

    source: TaskSource
    run: str
    restart: int
    seed: int
    groups_per_step: int
    group_size: int

    def group(self, position: int) -> list[Rollout]:
        """The rollouts of the group, as many as were recorded of a recorded task; for the step that should have it."""
        step, number = divmod(position, self.groups_per_step)
        index = train_index(self.source, position, self.seed)
        size = self.source.members(index) if isinstance(self.source, RecordedTasks) else self.group_size
        task, name = self.source.task(index), f"s{step + 1}-g{number}"
        return _group(Rollout("", self.run, self.restart, name, task, Mode.TRAIN, step + 1, 0, position=position), size)


def train_index(source: TaskSource, position: int, seed: int) -> int:
    """The task at a position of training: endless sources continue; finite ones are shuffled each epoch."""
    if source.size is None:
        return position
    epoch, place = divmod(position, source.size)
    order = list(range(source.size))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order[place]


def plan_evaluation(
    source: TaskSource, count: int, *, run: str, restart: int, step: int, mode: Mode, split: str, position: int,
    repeat: int = 1,
) -> list[list[Rollout]]:  # fmt: skip
    """`repeat` rollouts of each of the first tasks, the first task at `position` of the evaluation.

    Tasks that their source takes for those of training get the split `split`, the name of the held-out set. Each
    rollout is scored by itself, as a group of one; those of a task differ in their sampling seeds.
    """
    groups = []
    for n in range(count):
        task, name = source.task(n), f"s{step}-{split}-{mode.value.removeprefix('eval-')}-g{n}"
        task = replace(task, split=split) if task.split == "train" else task
        first = Rollout("", run, restart, name, task, mode, step, 0, position=position + n)
        groups += [[rollout] for rollout in _group(first, repeat)]
    return groups


def plan_look(source: TaskSource, *, run: str, restart: int) -> list[Rollout]:
    """Rollouts of the first task of training that nothing is trained on."""
    return _group(Rollout("", run, restart, "s0-look", source.task(0), Mode.EVAL_SAMPLED, 0, 0, position=0), 3)


def _group(first: Rollout, size: int) -> list[Rollout]:
    """A group of rollouts that differ in id and member alone."""
    name = f"{first.group}-r{first.restart}" if first.restart else first.group
    return [replace(first, id=f"{name}-m{member}", group=name, member=member) for member in range(size)]


async def recorded_episodes(store: Store, rollouts: Sequence[Rollout], hook: RunHooks) -> list[Episode]:
    """The episode of each rollout's counted attempt, as the `episode_built` hooks leave it, not yet scored.

    It has the recorded rewards that the agent reported, and what others said; rules compute theirs again. A rollout
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
    annotations = by_rollout(await store.annotations(keys)) if isinstance(store, ErasableStore) else {}
    attempts = {attempt.key: attempt for attempt in await store.attempts(*(rollout.id for rollout in rollouts))}
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
            annotations.get(rollout.id, ()),
        )
        episodes.append(hook.episode_built(episode))
    return episodes


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


def scoring_rules(loaded: LoadedConfig) -> list[ScoringRule]:
    """The reward rules of a run. Of tasks that no rule scores, the reward is what the agent itself reported."""
    rules = [
        ScoringRule(name, chosen.build(), section.weight, frozenset(section.modes), section.time_limit)
        for name, chosen in loaded.rewards.items()
        for section in [loaded.config.rewards[name]]
    ]
    tasks = frozenset(Mode) - {Mode.USE}
    is_scored = any(rule.modes & tasks for rule in rules)
    return rules if is_scored else [*rules, ScoringRule("reported", reported, modes=tasks)]


@dataclass(frozen=True)
class Scored:
    """A rollout that is done, with its scored episode."""

    rollout: Rollout
    episode: Episode
    reward_errors: list[Exception]


@dataclass(frozen=True)
class Collected:
    """Groups of scored episodes, and the exceptions of reward rules."""

    groups: list[list[Episode]]
    reward_errors: list[Exception] = field(default_factory=list)

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group]


class Queue(Protocol):
    """Runs rollouts: the server's queue, or what stands for it where they are recorded already."""

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Add these rollouts after those that were added before."""

    async def done(self, ids: Collection[str]) -> list[Rollout]:
        """Those of `ids` that are done; waits until one is. Asking changes nothing."""

    async def cancel(self, ids: Collection[str]) -> None:
        """End these; they are done when this returns."""


@dataclass(frozen=True)
class Collector:
    """Runs rollouts and makes episodes with rewards of them."""

    store: Store
    queue: Queue
    rules: Sequence[ScoringRule]
    endings: Mapping[Ending, float | Json]
    hook: RunHooks
    check_health: Callable[[], None]
    """Raises if a part of the run has died, so that no wait lasts for ever."""
    stall: StallWatch = field(default_factory=StallWatch)
    """Says why a wait is long."""

    async def collect(self, groups: Sequence[Sequence[Rollout]], phase: Phase) -> Collected:
        """Enqueue the groups and wait for all of them; if cancelled, cancel the rollouts that are not done."""
        rollouts = [rollout for group in groups for rollout in group]
        waiting = {rollout.id for rollout in rollouts}
        scored: dict[str, Scored] = {}
        await self.queue.enqueue(rollouts)
        try:
            while waiting:
                for done in await self.finished(waiting):
                    waiting.discard(done.rollout.id)
                    scored[done.rollout.id] = done
                phase.advance(1 - len(waiting) / len(rollouts), reward_note(done.episode for done in scored.values()))
        finally:
            if waiting:
                await self.queue.cancel(waiting)
        complete = [await self.complete([scored[rollout.id] for rollout in group]) for group in groups]
        collected = Collected(
            [[done.episode for done in group] for group in complete],
            [error for group in complete for done in group for error in done.reward_errors],
        )
        warn_of_failed_rules(collected)
        return collected

    async def finished(self, ids: Collection[str]) -> list[Scored]:
        """Those of `ids` that are done; waits until there is one. Several callers may wait, each for its own."""
        return await self.scored(await self.stall.watched(self._done(ids)))

    async def scored(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """Rollouts that are done, with their episodes as the rules score them; the rewards are recorded."""
        episodes = await recorded_episodes(self.store, rollouts, self.hook)
        stalled = await self.stall.kept_waiting(rollouts)
        episodes = [replace(e, dropped=DropReason.STALLED) if e.rollout in stalled else e for e in episodes]
        scored = await score_all(episodes, self.rules, self.endings)
        await self._put([reward for episode, _ in scored for reward in _rewards_of_rules(episode)])
        return [Scored(rollout, *outcome) for rollout, outcome in zip(rollouts, scored, strict=True)]

    async def complete(self, group: Sequence[Scored]) -> list[Scored]:
        """A complete group with the rewards of the rules that compare its rollouts."""
        scored = await score_groups([(done.episode, done.reward_errors) for done in group], self.rules, self.endings)
        known = {reward for done in group for reward in _rewards_of_rules(done.episode)}
        await self._put([r for episode, _ in scored for r in _rewards_of_rules(episode) if r not in known])
        return [Scored(done.rollout, *outcome) for done, outcome in zip(group, scored, strict=True)]

    async def _put(self, rewards: Sequence[Reward]) -> None:
        if rewards:
            await self.store.put(*rewards)

    async def _done(self, ids: Collection[str]) -> list[Rollout]:
        """Wait for the queue, and see meanwhile whether the run is well."""
        answer = asyncio.ensure_future(self.queue.done(ids))
        try:
            is_answered = False
            while not is_answered:
                looked = time.monotonic()
                is_answered = bool((await asyncio.wait({answer}, timeout=HEALTH_INTERVAL))[0])
                self.stall.slept(time.monotonic() - looked - HEALTH_INTERVAL)
                self.check_health()
            return answer.result()
        finally:
            answer.cancel()


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
    rewards = [episode.terminal for episode in episodes if episode.terminal is not None]
    return f"reward {sum(rewards) / len(rewards):.3f}" if rewards else ""


def _rewards_of_rules(episode: Episode) -> list[Reward]:
    """The rewards that are not stored already, as those are that the agent reported."""
    terminal = [r for r in episode.rewards if r.source != AGENT_SOURCE]
    return terminal + [r for t in episode.transitions for r in t.rewards]


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The rewards of one held-out task in one mode, one for each of its rollouts."""

    set: str
    mode: str
    task: str
    rewards: tuple[float, ...]

    def solved(self, success: float) -> float:
        """The share of the rollouts whose reward is at least `success`."""
        return sum(reward >= success for reward in self.rewards) / len(self.rewards)


@dataclass(slots=True)
class Evaluated:
    """What an evaluation found."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    """For the run's record, one for each set and mode."""
    metrics: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    """LLM calls made."""
    scores: list[TaskScore] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    episodes: dict[str, Sequence[Episode]] = field(default_factory=dict)
    """By set and mode, as `eval/sampled`."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the policies being served on held-out sets of tasks."""

    collector: Collector
    sets: Mapping[str, TaskSource]
    settings: EvalSection
    run: str
    restart: int
    observer: Observer

    async def evaluate(self, step: int, repeat: int = 1) -> Evaluated:
        """Every set in every mode, each task `repeat` times where it is sampled: greedy replies are always the same.

        The first evaluation raises an alarm if some rollouts failed, later ones only if all did.
        """
        evaluated, position = Evaluated(), 0
        for split, source in self.sets.items():
            count = min(self.settings.tasks, source.size or self.settings.tasks)
            for mode in self.settings.modes:
                tries = 1 if mode is Mode.EVAL_GREEDY else repeat
                groups = plan_evaluation(
                    *(source, count),
                    run=self.run,
                    restart=self.restart,
                    step=step,
                    mode=mode,
                    split=split,
                    position=position,
                    repeat=tries,
                )
                position += count
                await self._evaluate(evaluated, step, split, mode.value.removeprefix("eval-"), groups, tries)
        episodes = [episode for of_mode in evaluated.episodes.values() for episode in of_mode]
        evaluated.calls = sum(len({t.key.call for t in episode.transitions}) for episode in episodes)
        if step == 0 or common_failure(episodes):
            alarm = await failures(self.collector.store, episodes)
            evaluated.alarms = [] if alarm is None else [alarm]
        return evaluated

    async def _evaluate(
        self, evaluated: Evaluated, step: int, split: str, mode: str, groups: list[list[Rollout]], tries: int
    ) -> None:
        """Run the rollouts of one set in one mode, `tries` for each task; a task without a reward counts as 0."""
        started, name = time.monotonic(), f"{split}/{mode}"
        with self.observer.phase(f"evaluation {split} {mode}", step) as phase:
            episodes = (await self.collector.collect(groups, phase)).episodes
        metrics = episode_metrics(episodes)
        evaluated.metrics |= {f"{name}/{key}": value for key, value in metrics.items()}
        evaluated.episodes[name] = episodes
        for first in range(0, len(episodes), tries):
            rewards = tuple(episode.terminal or 0.0 for episode in episodes[first : first + tries])
            evaluated.scores.append(TaskScore(split, mode, episodes[first].task.id, rewards))
        seconds = time.monotonic() - started
        evaluated.entries.append(
            {
                "step": step,
                "set": split,
                "mode": mode,
                "reward": metrics["reward/mean"],
                "rollouts": len(episodes),
                "seconds": seconds,
            }
        )
