"""The training loop: draw groups of rollouts, credit, update, record, evaluate on held-out sets, checkpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from agl_core import hooks
from agl_core.config.load import LoadedConfig
from agl_core.errors import AglError
from agl_core.learning.batch import BatchPlan, StepBatches, make_batches
from agl_core.protocols import RecordedTasks, UpdateResult
from agl_core.types import AlarmName, DropReason, Rollout, TrainingRecord
from agl_server.engines.child import peak_rss_bytes
from agl_server.health.alarms import Watch, alarm_of_failures, alarms_on
from agl_server.health.certificate import recomputed_in
from agl_server.health.rollouts import contrast_metrics, episode_metrics, record_metrics, staleness_metrics
from agl_server.health.table import Alarm
from agl_server.health.verdict import check_patience, check_serving
from agl_server.training.checkpoints import Checkpoints, RunState
from agl_server.training.evaluation import Evaluation
from agl_server.training.metrics import Advance, MetricsLog, Observer, Prices, evaluation_line, step_line
from agl_server.training.recorded import RecordedGroups
from agl_server.training.rollouts import Experience, StepGroups, TrainingPlan
from agl_server.training.session import Session

Result = TypeVar("Result")


async def uninterrupted(work: Coroutine[Any, Any, Result]) -> Result:
    """Finish `work` even if the caller is cancelled; the cancellation takes effect afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


@dataclass
class Trainer:
    """One run's training; all parts are passed in, started."""

    loaded: LoadedConfig
    session: Session
    checkpoints: Checkpoints
    log: MetricsLog
    observer: Observer
    on_rollouts: Sequence[AlarmName] = ()
    """The alarms on the rollouts of a step."""
    state: RunState = field(default_factory=RunState)
    watch: Watch = field(default_factory=Watch)
    saved_step: int = field(init=False)
    stops_without_data: ClassVar[bool] = True
    """Training ends with an error after two steps in a row with nothing to train on."""
    _counted: Mapping[str, int] = field(default_factory=dict, init=False)
    """The engine's counters when they were last asked."""
    _latest: StepGroups = field(default_factory=lambda: StepGroups([]), init=False)
    _hook_failures: int = field(default=0, init=False)
    """The failures of lifecycle hooks that metrics have."""
    _resumed: float = field(default_factory=time.monotonic, init=False)
    _plan: BatchPlan = field(init=False)
    _experience: Experience | RecordedGroups = field(init=False)
    _is_judged: bool = field(init=False)
    """No rule scores what is trained on: it is imitated, or somebody said what is better."""

    def __post_init__(self) -> None:
        self.saved_step = self.state.step
        config, session, source = self.loaded.config, self.session, self.session.tasks["train"]
        self.state.tokens = self.checkpoints.read_tokens() or self.state.tokens
        recorded = source if isinstance(source, RecordedTasks) else None
        without_logprobs = recorded is not None and (recorded.without_logprobs or self.loaded.trains_on_texts)
        self._is_judged = self.loaded.imitates or (recorded is not None and recorded.has_preferences)
        self._plan = BatchPlan.configured(self.loaded, without_logprobs=without_logprobs)
        per_step = self._groups_per_step
        plan = TrainingPlan(source, session.run, session.restart, config.seed, per_step, config.train.group_size)
        if recorded is not None:
            has_contrast, begun = self._plan.has_contrast, self.state.groups_begun
            self._experience = RecordedGroups(
                self.loaded, recorded, session.engine, session.collector, plan, has_contrast, begun
            )
            return
        self._experience = Experience(
            session.collector,
            plan,
            in_flight=config.asynchronous.in_flight or per_step * (config.asynchronous.max_staleness + 1),
            has_contrast=self._plan.has_contrast,
            refill=config.train.refill,
            begun=self.state.groups_begun,
            unfinished=self.state.groups_unfinished,
        )

    async def train(self) -> None:
        """Train from where `state` is to the last step, or until `stopped`; TrainingError without data to train on."""
        settings = self.loaded.config.train
        last, every = settings.steps, self.loaded.config.eval.every
        self._resumed = time.monotonic() - self.state.seconds
        await self._count()  # The first look is no part of a step.
        if every and not self.state.evaluations:
            await self._evaluate()
        try:
            while self.state.step < last and not self.stopped:
                step = self.state.step + 1
                started = time.monotonic()
                with self.observer.phase("rollouts", step) as advance:
                    drawn = await self._draw(step, advance)
                await uninterrupted(self._learn(step, drawn, started))
                if every and (step % every == 0 or step == last):
                    await self._evaluate()
                rewards = self.state.rewards
                leads = step == max(rewards, key=rewards.__getitem__, default=0)
                if step % settings.checkpoint_every == 0 or step == last or leads or self.stopped:
                    await uninterrupted(self.checkpoint())
                await self._after_step()
        finally:
            await self._experience.cancel()
            with suppress(AglError, OSError):
                await self._count()  # Rollouts that no step had took tokens too.
        if self.stopped:
            self.observer.say(
                f"Training stopped early at step {self.state.step}: {self.stopped}. To train on, resume it with a "
                f"higher train.stop.tokens, with another eval.patience, or from another checkpoint (RUN@best)."
            )

    @property
    def stopped(self) -> str:
        """Why training ends before its last step; empty as long as it goes on."""
        config = self.loaded.config
        if self.state.step >= config.train.steps:
            return ""
        spent, budget = sum(self.state.tokens.values()), config.train.stop.tokens
        if 0 < budget <= spent:
            return f"{spent:,} tokens are spent, and train.stop.tokens is {budget:,}"
        return self.state.plateau(config.eval.patience)

    async def _after_step(self) -> None:
        """Hook for subclasses, called after each step."""

    @property
    def _groups_per_step(self) -> int:
        """The groups of rollouts of `[tasks.train]` that a step draws."""
        return self.loaded.config.train.groups_per_step

    async def _draw(self, step: int, advance: Advance) -> StepGroups:
        """The groups of a step; waits until there are enough."""
        return await self._experience.draw(self.loaded.config.train.steps - self.state.step, advance)

    async def _learn(self, step: int, drawn: StepGroups, started: float) -> None:
        """Credit, update, record, and tell of the step that `started` then."""
        settings, versions, state = self.loaded.config.train, self.session.versions, self.state
        ages = staleness_metrics(drawn.episodes, versions)
        batches = make_batches(drawn.groups, self._plan, weights=drawn.weights, step=step, versions=versions)
        rolled_out = time.monotonic()
        results = await self._update(step, batches)
        updated = time.monotonic()
        records = await self._record(step, batches, results, drawn.rollouts)
        failure = await alarm_of_failures(self.session.server.store, drawn.episodes)
        metrics = {
            **self._metrics(drawn, batches, results, records),
            **ages,
            **await self._count(),
            "seconds/rollouts": rolled_out - started,
            "seconds/update": updated - rolled_out,
            "seconds/step": time.monotonic() - started,
        }
        raised = [*alarms_on(drawn.episodes, self.on_rollouts), *([failure] if failure else [])]
        alarms = self.watch.look(metrics, [*raised, *self.session.stall.take()])
        state.step, self._latest = step, drawn
        state.groups_begun, state.groups_unfinished = self._experience.begun, self._experience.unfinished
        self.log.write(step, "train", self.watch.steps[-1], alarms, self.stopped)
        self.observer.say(step_line(step, settings.steps, metrics, drawn.note))
        self._say(f"step {step}", alarms)
        if self.loaded.config.alarms.get(AlarmName.LOGPROB_GAP) is not False:
            check_serving(step, {name: result.metrics for name, result in results.items()})
        if self.stops_without_data:
            check_patience(step, self.watch.steps)

    async def _update(self, step: int, batches: StepBatches) -> dict[str, UpdateResult]:
        """Update every policy that has a batch, each by its own algorithm; the others stay as they are."""
        results: dict[str, UpdateResult] = {}
        with self.observer.phase("update", step) as advance:
            policies = [policy for policy in self.loaded.policies if policy in batches.batches]
            for done, policy in enumerate(policies):

                def progress(share: float, done: int = done) -> None:
                    advance((done + share) / len(policies), "")

                update = self.session.engine.update(policy, batches.batches[policy], progress)
                result = results[policy] = await self.session.stall.watched(update, "which makes an update")
                self.session.versions[policy] = result.version
                self.loaded.plugins.hook.call(hooks.policy_updated, policy, result.version, result.metrics)
        return results

    async def _record(
        self, step: int, batches: StepBatches, results: Mapping[str, UpdateResult], rollouts: Sequence[Rollout]
    ) -> list[TrainingRecord]:
        """Store the training records, and with each rollout the step that trained on it, all or nothing."""
        records = [*batches.dropped]
        for policy, result in results.items():
            batch, advantages, weights = batches.batches[policy], result.advantage_N.tolist(), result.weight_N.tolist()
            rows = zip(batch.keys, batch.values_N.tolist(), advantages, weights, result.dropped, strict=True)
            for (key, credit, advantage, weight, reason), seen in zip(rows, recomputed_in(batch, result), strict=True):
                compared = advantage if reason in (None, DropReason.NO_ADVANTAGE) else None
                records.append(TrainingRecord(*key, step, credit, compared, weight, reason, seen))
        moved = [replace(rollout, step=step) for rollout in rollouts if rollout.step != step]
        store = self.session.server.store
        removed = await store.erased([rollout.id for rollout in rollouts])
        await store.put(
            *(record for record in records if record.rollout not in removed),
            *(rollout for rollout in moved if rollout.id not in removed),
        )
        return records

    def _metrics(
        self,
        drawn: StepGroups,
        batches: StepBatches,
        results: Mapping[str, UpdateResult],
        records: Sequence[TrainingRecord],
    ) -> dict[str, float]:
        """The numbers of a step, but for its times and tokens."""
        several = len(self.loaded.policies) > 1
        before, self._hook_failures = self._hook_failures, self.loaded.plugins.hook.failures.total()
        rewards = episode_metrics(drawn.episodes)
        if self.loaded.is_rewarded:
            rewards |= contrast_metrics(drawn.groups, self._plan)
        if self._is_judged:
            rewards = {k: v for k, v in rewards.items() if not k.startswith("reward/")}
        return {
            **rewards,
            **drawn.metrics,
            **record_metrics(drawn.episodes, records),
            **{
                f"update/{policy}/{key}" if several else f"update/{key}": value
                for policy, result in results.items()
                for key, value in result.metrics.items()
            },
            **{f"episodes_dropped/{reason}": float(count) for reason, count in batches.episodes_dropped.items()},
            "transitions/without_logprobs": float(sum((~b.sampled_N).sum() for b in batches.batches.values())),
            "hooks/failed": float(self._hook_failures - before),
        }

    def _say(self, where: str, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            if alarm.name is not AlarmName.STALL:
                self.observer.say(f"{where}: {alarm.text}")

    async def _count(self) -> dict[str, float]:
        """Count memory and tokens; returns the tokens since the last count, by kind, and what they cost."""
        stats = await self.session.stall.watched(self.session.engine.stats(), "which counts")
        peak = peak_rss_bytes() + int(stats.get("peak_rss_bytes", 0))
        self.state.peak_rss_bytes = max(self.state.peak_rss_bytes, peak)
        counted = {key.removeprefix("tokens_"): int(n) for key, n in stats.items() if key.startswith("tokens_")}
        new = {kind: max(0, n - self._counted.get(kind, 0)) for kind, n in counted.items()}
        self._counted = counted
        tokens = self.state.tokens
        tokens |= {kind: tokens.get(kind, 0) + n for kind, n in new.items() if kind != "reused"}
        self.checkpoints.write_tokens(tokens)
        cost = Prices.of(self.state.config).cost(new)
        return {f"tokens/{kind}": float(n) for kind, n in new.items()} | ({"cost": cost} if cost else {})

    async def _evaluate(self) -> Evaluation:
        step = self.state.step
        evaluated = await self.session.evaluator.evaluate(step)
        alarms = self.watch.wanted(evaluated.alarms)
        self._say(f"step {step}, evaluation", alarms)
        self.state.evaluations += evaluated.entries
        metrics = {**evaluated.metrics, **await self._count()}
        if evaluated.entries:
            self.log.write(step, "eval", metrics, [*alarms, *self.session.stall.take()], self.stopped)
            self.observer.say(evaluation_line(step, self.loaded.config.train.steps, evaluated.entries))
        return evaluated

    async def checkpoint(self) -> Path:
        self.count_time()
        part = self.checkpoints.begin(self.state.step)
        await self.session.engine.save(part)
        self.saved_step = self.state.step
        folder = await asyncio.to_thread(self.checkpoints.commit, part, self.state)
        await asyncio.to_thread(self.log.keep, self.state.step, self._latest.episodes)
        return folder

    def count_time(self) -> None:
        """Bring `state.seconds` up to now."""
        self.state.seconds = time.monotonic() - self._resumed
