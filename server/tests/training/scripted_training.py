"""A training loop whose rollouts end when a test says so, and whose engine counts versions and keeps batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from memory_store import MemoryStore
from scripted_run import MINIMAL, CountingEngine, scripted_config, scripted_session

from agl_core.config.models import RunConfig
from agl_core.plugins import Plugins
from agl_core.protocols import TaskSource
from agl_core.testing import episodes as make
from agl_core.types import (
    AlarmName,
    DropReason,
    Ending,
    Episode,
    Reward,
    Rollout,
    Task,
    TrainingRecord,
    Transition,
)
from agl_server.health.table import Alarm
from agl_server.training.checkpoints import Checkpoints, RunState
from agl_server.training.evaluation import Evaluation
from agl_server.training.loop import Trainer
from agl_server.training.metrics import MetricsLog, Observer
from agl_server.training.rollouts import ScoredRollout


@dataclass
class Numbers:
    """Tasks; the even ones say their split."""

    size: int | None = None

    def task(self, index: int) -> Task:
        return Task(f"t{index}", index) if index % 2 else Task(f"t{index}", index, "test")


class StuckError(Exception):
    """Somebody waits for rollouts of which none will ever end."""


def episode(
    rollout: str = "r", versions: Sequence[int | None] = (0,), *, terminal: float = 1.0, policy: str = "default",
    **changes: Any,
) -> Episode:  # fmt: skip
    """One call by each of these versions."""
    transitions = [transition(rollout, turn, version, policy) for turn, version in enumerate(versions)]
    return make.episode(*transitions, rollout=rollout, terminal=terminal, **changes)


def transition(rollout: str, turn: int, version: int | None, policy: str = "default") -> Transition:
    tokens, logprobs = np.arange(3, dtype=np.int32), np.full(3, -0.5, np.float32)
    ids = {"prompt_ids": tokens[:2], "response_ids": tokens, "logprobs": logprobs}
    return make.transition(turn, rollout=rollout, version=version, policy=policy, **ids)


@dataclass
class ScriptedCollector:
    """Rollouts make one call when they are begun and one when they end; those that `held` says do not end yet.

    Several that could end do so one by one, in the order that `first` gives them.
    """

    versions: Mapping[str, int]
    held: Callable[[Rollout], bool] = lambda rollout: False
    first: Callable[[Rollout], Any] = lambda rollout: 0
    reward: Callable[[Rollout], float] = lambda rollout: float(rollout.member)
    ending: Callable[[Rollout], Ending] = lambda rollout: Ending.FINISHED
    """Those that do not finish make no call, and are dropped."""
    judges: bool = True
    """A rule gives rewards."""
    reports: bool = False
    """The agent itself reports a reward."""
    out: dict[str, tuple[Rollout, int]] = field(default_factory=dict)
    """Rollouts under way, with the version that answered the first call."""
    begun: list[str] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    most_groups: int = 0

    @property
    def queue(self) -> ScriptedCollector:
        return self

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self.begun.append(rollout.id)
            self.out[rollout.id] = rollout, self.versions["default"]
        self.most_groups = max(self.most_groups, len({rollout.group for rollout, _ in self.out.values()}))

    async def complete(self, rollouts: Sequence[ScoredRollout]) -> list[ScoredRollout]:
        return list(rollouts)

    def warn_of_failed_rules(self, rollouts: Sequence[ScoredRollout]) -> None:
        """No rule fails."""

    async def finished(self, ids: Collection[str]) -> list[ScoredRollout]:
        ready = [rollout for rollout, _ in self.out.values() if rollout.id in ids and not self.held(rollout)]
        if not ready:
            raise StuckError
        rollout = min(ready, key=self.first)
        _, began = self.out.pop(rollout.id)
        ending = self.ending(rollout)
        outcome = episode(
            rollout.id,
            (began, self.versions["default"]) if ending is Ending.FINISHED else (),
            terminal=self.reward(rollout),
            group=rollout.group,
            task=rollout.task,
            member=rollout.member,
            dropped=None if ending is Ending.FINISHED else DropReason.ENDING,
            ending=ending,
        )
        if self.judges:
            outcome = replace(outcome, rewards=(Reward(rollout.id, 0, "right", self.reward(rollout), "right"),))
        if self.reports:
            outcome = replace(outcome, rewards=(*outcome.rewards, Reward(rollout.id, 0, "own", 1.0, "agent")))
        return [ScoredRollout(rollout, outcome, [])]

    async def cancel(self, ids: Collection[str]) -> None:
        self.cancelled |= set(ids)


@dataclass
class Log:
    """Metrics in memory."""

    lines: list[Mapping[str, float]] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)

    def write(
        self, step: int, kind: str, metrics: Mapping[str, float], alarms: Sequence[Alarm] = (), stopped: str = ""
    ) -> None:
        self.alarms += alarms
        self.lines.append({"step": step, **metrics})

    def keep(self, step: int, episodes: Sequence[Episode]) -> None: ...


class NoEvaluation:
    async def evaluate(self, step: int) -> Evaluation:
        return Evaluation()


@dataclass
class Bench:
    """A trainer, and everything around it that a test looks at."""

    trainer: Trainer
    collector: ScriptedCollector
    engine: CountingEngine
    store: MemoryStore
    log: Log

    @property
    def trained(self) -> list[list[str]]:
        """The rollouts of each update's batch, in their order."""
        return [list(dict.fromkeys(key.rollout for key in batch.keys)) for batch in self.engine.batches]

    @property
    def stale(self) -> set[str]:
        """The rollouts that were dropped for their age."""
        return {
            record.rollout
            for record in self.store.written
            if isinstance(record, TrainingRecord) and record.dropped is DropReason.STALE
        }

    def metric(self, key: str) -> list[float]:
        """The values of a metric, by step."""
        return [line[key] for line in self.log.lines]


def make_bench(
    folder: Path,
    state: RunState | None = None,
    restart: int = 0,
    plugins: Plugins | None = None,
    tasks: TaskSource | None = None,
    **settings: Any,
) -> Bench:
    """`settings` are those of [train], but for `max_staleness`, `in_flight`, `eval_…` and `alarms`."""
    asynchronous = {key: settings.pop(key) for key in ("max_staleness", "in_flight") if key in settings}
    evaluation = {key.removeprefix("eval_"): settings.pop(key) for key in [*settings] if key.startswith("eval_")}
    alarms = settings.pop("alarms", {})
    train = {"steps": 4, "groups_per_step": 2, "group_size": 2, "checkpoint_every": 1, **settings}
    config = RunConfig.model_validate(
        {
            **MINIMAL,
            "train": train,
            "alarms": alarms,
            **({"async": asynchronous} if asynchronous else {}),
            "eval": evaluation,
        }
    )
    engine, store, log = CountingEngine(), MemoryStore(), Log()
    engine.version = (state or RunState()).step
    loaded, session = scripted_config(config, plugins), scripted_session(store, engine.version)
    collector = ScriptedCollector(session.versions)
    session.restart, session.engine, session.collector = restart, engine, collector
    session.evaluator, session.tasks = NoEvaluation(), {"train": tasks or Numbers()}
    trainer = Trainer(
        loaded,
        session,
        Checkpoints(folder, keep=100),
        cast(MetricsLog, log),
        Observer(),
        on_rollouts=(AlarmName.NO_REWARD, AlarmName.CONTRADICTED_TOOL_RESULTS),
        state=replace(state) if state else RunState(),
    )
    return Bench(trainer, collector, engine, store, log)
