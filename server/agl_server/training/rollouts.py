"""Rollouts: which ones a run makes, the episodes with rewards that come of them, and the groups of each update.

    plan ──▶ queue ──▶ workers run the agent ──▶ records ──▶ episodes ──▶ reward rules ──▶ scored ──▶ drawn
             └─────────────────── at most `in_flight` groups of training ──────────────────────────┘

If as many groups are in flight as an update takes, each step waits for exactly the groups that it began: this is the
synchronous loop. If there are more, the others run on while the weights are updated, and carry over to later steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal, TypeVar

from agl_core.config.load import LoadedConfig
from agl_core.errors import PluginError
from agl_core.learning.rewards import AGENT_SOURCE, ScoringRule, failure_text, reported, score_all, score_groups
from agl_core.learning.transitions import build_episode
from agl_core.plugins import RunHooks
from agl_core.protocols import RecordedTasks, TaskSource, train_index
from agl_core.store import Record, Store
from agl_core.types import (
    AlarmName,
    Annotation,
    Attempt,
    AttemptKey,
    Call,
    DropReason,
    Ending,
    Episode,
    Json,
    Mode,
    RecordedRollout,
    Reward,
    Rollout,
    RolloutState,
    ToolResult,
    TrainingRecord,
    scored_return,
)
from agl_server.health.alarms import StallWatch
from agl_server.health.table import Alarm
from agl_server.training.lineages import episode_of
from agl_server.training.metrics import Advance

if TYPE_CHECKING:  # A run is read where no server is installed, too.
    from agl_server.queue import RolloutQueue

AttemptRecord = TypeVar("AttemptRecord", Call, ToolResult, Reward, TrainingRecord, Annotation)
logger = logging.getLogger(__name__)

UNKNOWN_CALLS = (
    "agl_core.reward(call=…) named calls that the attempt does not have, and these rewards do not count. Give it the "
    "reply as the client returned it, or its id."
)
HEALTH_INTERVAL = 2.0
"""Seconds between two looks at the parts of the run."""


async def read_attempts(
    store: Store, rollouts: Sequence[Rollout], attempts: Sequence[Attempt]
) -> dict[AttemptKey, RecordedRollout]:
    """The records of these attempts at the rollouts, in their order."""
    keys, by_id = [attempt.key for attempt in attempts], {rollout.id: rollout for rollout in rollouts}
    calls, tool_results = by_attempt(await store.calls(keys)), by_attempt(await store.tool_results(keys))
    rewards, annotations = by_attempt(await store.rewards(keys)), by_attempt(await store.annotations(keys))
    return {
        key: RecordedRollout(
            by_id[attempt.rollout], attempt, calls[key], tool_results[key], rewards[key], annotations[key]
        )
        for key, attempt in zip(keys, attempts, strict=True)
    }


def by_attempt(records: Iterable[AttemptRecord]) -> defaultdict[AttemptKey, list[AttemptRecord]]:
    grouped = defaultdict[AttemptKey, list[AttemptRecord]](list)
    for record in records:
        grouped[AttemptKey(record.rollout, record.attempt)].append(record)
    return grouped


def counted_attempts(rollouts: Iterable[Rollout]) -> list[AttemptKey]:
    return [AttemptKey(r.id, r.counted_attempt) for r in rollouts if r.counted_attempt is not None]


def trained_episode(recorded: RecordedRollout, housekeeping: Literal["drop", "keep"]) -> Episode:
    """The episode of what was recorded, with the calls that training has by `train.housekeeping`."""
    episode = episode_of(recorded)
    is_whole = housekeeping == "drop" or not episode.housekeeping
    return episode if is_whole else replace(episode, transitions=tuple(episode.delivered), housekeeping=())


async def recorded_episodes(
    store: Store, rollouts: Sequence[Rollout], hook: RunHooks, housekeeping: Literal["drop", "keep"]
) -> list[Episode]:
    """The episode of each rollout's counted attempt, as the `episode_built` hooks leave it, not yet scored.

    Its rewards are those that the agent reported; rules compute theirs again. A rollout without a counted attempt
    (cancelled, or lost with its worker) is an episode dropped for its ending.
    """
    keys = {*counted_attempts(rollouts)}
    attempts = [attempt for attempt in await store.attempts(*(key.rollout for key in keys)) if attempt.key in keys]
    by_rollout = {key.rollout: records for key, records in (await read_attempts(store, rollouts, attempts)).items()}
    episodes = []
    for rollout in rollouts:
        if (records := by_rollout.get(rollout.id)) is None:
            nothing = Attempt(rollout.id, 0, "", started=0.0, ending=rollout.ending or Ending.CANCELLED)
            episodes.append(replace(build_episode(rollout, nothing, ()), dropped=DropReason.ENDING))
            continue
        reported = [reward for reward in records.rewards if reward.source == AGENT_SOURCE]
        episodes.append(hook.episode_built(trained_episode(replace(records, rewards=reported), housekeeping)))
    return episodes


def scoring_rules(loaded: LoadedConfig) -> list[ScoringRule]:
    """The reward rules of a run. Tasks that no rule scores get the reward that the agent itself reported."""
    rules = [
        ScoringRule(name, chosen.build(loaded.config), section.weight, frozenset(section.modes), section.time_limit)
        for name, chosen in loaded.rewards.items()
        for section in [loaded.config.rewards[name]]
    ]
    tasks = frozenset(Mode) - {Mode.USE}
    is_scored = any(rule.modes & tasks for rule in rules)
    return rules if is_scored else [*rules, ScoringRule("reported", reported, modes=tasks)]


@dataclass(frozen=True)
class ScoredRollout:
    rollout: Rollout
    episode: Episode
    reward_errors: list[Exception]


@dataclass(frozen=True)
class Collector:
    """Runs rollouts and makes episodes with rewards of them."""

    store: Store
    queue: RolloutQueue
    rules: Sequence[ScoringRule]
    endings: Mapping[Ending, float | Json]
    hook: RunHooks
    check_health: Callable[[], None]
    """Raises if a part of the run has died, so that no wait lasts for ever."""
    stall: StallWatch = field(default_factory=StallWatch)
    housekeeping: Literal["drop", "keep"] = "drop"

    async def collect(self, groups: Sequence[Sequence[Rollout]], advance: Advance) -> list[Episode]:
        """The episodes of these groups; runs the rollouts that are not done, and cancels them if it is cancelled."""
        rollouts = [rollout for group in groups for rollout in group]
        recorded = [rollout for rollout in rollouts if rollout.state is RolloutState.DONE]
        scored = {done.rollout.id: done for done in await self.scored(recorded)}
        new = [rollout for rollout in rollouts if rollout.id not in scored]
        waiting = {rollout.id for rollout in new}
        try:
            await self.queue.enqueue(new)
            while waiting:
                for done in await self.finished(waiting):
                    waiting.discard(done.rollout.id)
                    scored[done.rollout.id] = done
                advance(1 - len(waiting) / len(rollouts), reward_note(done.episode for done in scored.values()))
        finally:
            if waiting:
                await self.queue.cancel(waiting)
        complete = await self.complete([scored[rollout.id] for rollout in rollouts])
        self.warn_of_failed_rules(complete)
        return [done.episode for done in complete]

    async def finished(self, ids: Collection[str]) -> list[ScoredRollout]:
        """Wait until one of `ids` is done, and score those that are. Several callers may wait, each for its own."""
        return await self.scored(await self.stall.watched(self._done(ids)))

    async def scored(self, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
        """`judged` for rollouts that are done: their episodes are read from the store."""
        episodes = await recorded_episodes(self.store, rollouts, self.hook, self.housekeeping)
        stalled = await self.stall.kept_waiting(rollouts)
        episodes = [replace(e, dropped=DropReason.STALLED) if e.rollout in stalled else e for e in episodes]
        return await self.judged(rollouts, episodes)

    async def judged(self, rollouts: Sequence[Rollout], episodes: Sequence[Episode]) -> list[ScoredRollout]:
        """Rollouts with their episodes as the rules score them; the rewards are recorded."""
        return await self._kept(rollouts, await score_all(episodes, self.rules, self.endings))

    async def complete(self, rollouts: Sequence[ScoredRollout]) -> list[ScoredRollout]:
        """The rollouts of complete groups, with the rewards of the rules that compare those of a group."""
        scored = await score_groups([(done.episode, done.reward_errors) for done in rollouts], self.rules, self.endings)
        return await self._kept([done.rollout for done in rollouts], scored)

    async def _kept(
        self, rollouts: Sequence[Rollout], scored: Sequence[tuple[Episode, list[Exception]]]
    ) -> list[ScoredRollout]:
        """Scored rollouts; their rewards are recorded, and which rules failed, and why, with the attempts."""
        records: list[Record] = [reward for episode, _ in scored for reward in _rewards_of_rules(episode)]
        failed = {(episode.rollout, episode.attempt): errors for episode, errors in scored if errors}
        for attempt in await self.store.attempts(*(rollout for rollout, _ in failed)):
            texts = [t for e in failed.get(attempt.key, ()) if (t := failure_text(e)) not in (attempt.error or "")]
            if texts:
                records.append(replace(attempt, error="\n".join(filter(None, [attempt.error, *texts]))))
        await self.store.put(*records)
        return [ScoredRollout(rollout, *outcome) for rollout, outcome in zip(rollouts, scored, strict=True)]

    def warn_of_failed_rules(self, rollouts: Sequence[ScoredRollout]) -> None:
        """Warn if rules failed, or an agent rewarded unknown calls; PluginError if rules failed on every rollout."""
        if lost := [scored.rollout.id for scored in rollouts if uncounted_rewards(scored.episode)]:
            logger.warning("%s of %s rollouts (the first: %s): %s", len(lost), len(rollouts), lost[0], UNKNOWN_CALLS)
        errors = list({id(error): error for scored in rollouts for error in scored.reward_errors}.values())
        if not errors:
            return
        first = failure_text(errors[0])
        dropped = sum(s.episode.dropped in (DropReason.REWARD_FAILED, DropReason.NON_FINITE) for s in rollouts)
        if dropped == len(rollouts):
            raise PluginError(
                f"Reward rules failed on every rollout. {first}. Fix the rule; a run that had begun can be resumed."
            ) from errors[0]
        seen = f"reward rules failed {len(errors)} times; {dropped} of {len(rollouts)} rollouts were dropped. {first}"
        if 10 * dropped >= len(rollouts):
            self.stall.alarms.append(Alarm.of(AlarmName.REWARD_FAILED, seen))
        logger.warning("%s", seen)

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


def uncounted_rewards(episode: Episode) -> list[Reward]:
    """The rewards of calls that are not in the episode."""
    known = {(t.key.call, t.key.choice) for t in episode.transitions}
    return [r for r in episode.rewards if r.call is not None and (r.call, r.choice) not in known]


def without_contrast(group: Sequence[ScoredRollout]) -> list[ScoredRollout]:
    """The group, dropped because its rollouts are all alike."""
    return [replace(s, episode=replace(s.episode, dropped=s.episode.dropped or DropReason.NO_CONTRAST)) for s in group]


def reward_note(episodes: Iterable[Episode]) -> str:
    """The mean reward so far, for the progress display."""
    rewards = [reward for episode in episodes if (reward := scored_return(episode)) is not None]
    return f"reward {sum(rewards) / len(rewards):.3f}" if rewards else ""


def _rewards_of_rules(episode: Episode) -> list[Reward]:
    """The rewards to store: those that the agent reported are, and a dropped rollout has no more than its reason."""
    if episode.dropped is DropReason.REWARD_FAILED:
        return []
    of_calls = (r for t in episode.transitions for r in t.rewards)
    return [*(r for r in episode.rewards if r.source != AGENT_SOURCE), *of_calls]


@dataclass(frozen=True)
class StepGroups:
    groups: list[list[Episode]]
    weights: list[float] = field(default_factory=list)
    """The weight of each group in the loss; none: all 1."""
    rollouts: list[Rollout] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the step: groups that wait, among others."""
    note: str = ""
    """A remark for the line of the step."""

    @classmethod
    def of(cls, groups: Sequence[Sequence[ScoredRollout]], metrics: Mapping[str, float]) -> StepGroups:
        rollouts = [scored.rollout for group in groups for scored in group]
        return cls([[scored.episode for scored in group] for group in groups], rollouts=rollouts, metrics=metrics)

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group]


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
        first = Rollout("", self.run, self.restart, name, task, Mode.TRAIN, step + 1, 0, position=position)
        return group_of(first, size)


def group_of(first: Rollout, size: int) -> list[Rollout]:
    """A group of rollouts that differ in id and member alone."""
    name = f"{first.group}-r{first.restart}" if first.restart else first.group
    return [replace(first, id=f"{name}-m{member}", group=name, member=member) for member in range(size)]


class Experience:
    """Keeps groups of a plan in flight and draws them for updates.

    Up to `refill` groups of an update without contrast (`BatchPlan.has_contrast`) are drawn dropped, and a fresh group
    is run for each (dynamic sampling: DAPO, arXiv 2503.14476, section 3.2). A resumed run passes the number of groups
    begun so far, and the positions of those that are `unfinished`, which are begun again first.
    """

    def __init__(
        self,
        collector: Collector,
        plan: TrainingPlan,
        *,
        in_flight: int,
        has_contrast: Callable[[Sequence[Episode]], bool],
        refill: int = 0,
        begun: int = 0,
        unfinished: Iterable[int] = (),
    ) -> None:
        self._collector, self._plan = collector, plan
        self._per_update, self._in_flight = plan.groups_per_step, in_flight
        self._has_contrast, self._refill = has_contrast, refill
        self.begun, self._again = begun, sorted(unfinished)
        self._position: dict[str, int] = {}
        self._running: dict[str, dict[str, ScoredRollout | None]] = {}
        """By group: its rollouts in the order of the members, each with its scored episode once it is done."""
        self._complete: dict[str, list[ScoredRollout]] = {}
        """By group, in the order of their completion: those that no update has had yet."""
        self._replaced: dict[str, list[ScoredRollout]] = {}
        """By group: those that the next update has others for."""

    @property
    def unfinished(self) -> list[int]:
        """The positions of the groups that were begun and that no update has had."""
        return sorted([*self._again, *(self._position[name] for name in self._under_way)])

    async def draw(self, updates_left: int, advance: Advance) -> StepGroups:
        """The groups of the next update, in the order of their plan; waits until enough are complete.

        No more groups are begun than `updates_left` (this one included) can use.
        """
        before = set(self._under_way)
        most = min(self._in_flight, updates_left * self._per_update)
        arrived: list[Episode] = []
        await self._begin(most)
        while len(self._complete) < self._per_update:
            arrived += await self._receive()
            advance(self._share_complete(), reward_note(arrived))
            await self._begin(most)
        return self._drawn(before)

    async def cancel(self) -> None:
        if waiting := self._waiting:
            await self._collector.queue.cancel(waiting)

    @property
    def _under_way(self) -> list[str]:
        return [*self._running, *self._complete]

    @property
    def _waiting(self) -> set[str]:
        """The rollouts that are not done."""
        return {id for rollouts in self._running.values() for id, scored in rollouts.items() if scored is None}

    async def _begin(self, most: int) -> None:
        """Begin groups until `most` are under way."""
        rollouts: list[Rollout] = []
        for _ in range(most - len(self._under_way)):
            position = self._again.pop(0) if self._again else self.begun
            self.begun = max(self.begun, position + 1)
            group = self._plan.group(position)
            self._position[group[0].group] = position
            self._running[group[0].group] = dict.fromkeys(rollout.id for rollout in group)
            rollouts += group
        if rollouts:
            await self._collector.queue.enqueue(rollouts)

    async def _receive(self) -> list[Episode]:
        """Wait for rollouts, and keep the groups that they complete."""
        finished = await self._collector.finished(self._waiting)
        for scored in finished:
            self._running[scored.rollout.group][scored.rollout.id] = scored
        done = {name: [s for s in rollouts.values() if s is not None] for name, rollouts in self._running.items()}
        done = {name: group for name, group in done.items() if len(group) == len(self._running[name])}
        compared = iter(await self._collector.complete([scored for group in done.values() for scored in group]))
        for name, group in done.items():
            del self._running[name]
            complete = list(islice(compared, len(group)))
            group_has_contrast = self._has_contrast([scored.episode for scored in complete])
            if len(self._replaced) < self._refill and not group_has_contrast:
                self._replaced[name] = without_contrast(complete)
                continue
            self._complete[name] = complete
        return [scored.episode for scored in finished]

    def _drawn(self, before: set[str]) -> StepGroups:
        replaced, self._replaced = self._replaced, {}
        first = {name: self._complete.pop(name) for name in [*self._complete][: self._per_update]}
        by_name = first | replaced
        metrics = {
            "groups/in_flight": float(len(self._under_way)),
            "groups/carried_over": float(len(before & by_name.keys())),
            "groups/replaced": float(len(replaced)),
            "groups/waiting": float(len(self._complete)),
        }
        groups = [by_name[name] for name in sorted(by_name, key=self._position.__getitem__)]
        self._collector.warn_of_failed_rules([*chain.from_iterable(groups)])
        return StepGroups.of(groups, metrics)

    def _share_complete(self) -> float:
        """The share that is done of the groups nearest to completion, as many as an update takes."""
        shares = [sum(map(bool, group.values())) / len(group) for group in self._running.values()]
        return sum(sorted([1.0] * len(self._complete) + shares)[-self._per_update :]) / self._per_update
