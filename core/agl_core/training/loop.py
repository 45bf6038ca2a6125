"""The training loop: run groups of rollouts, reward, credit, update, evaluate, checkpoint."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import to_jsonable_python

from agl_core.config import LoadedConfig
from agl_core.learning import PolicyCredit, StepBatches, make_batches, without_stale
from agl_core.memory import peak_rss_bytes
from agl_core.protocols import Buffer, DrawContext, Progress, RecordedTasks, UpdateResult
from agl_core.store.interface import ErasableStore
from agl_core.training.alarms import Alarm
from agl_core.training.alarms.rollouts import (
    Check,
    Patience,
    check_serving,
    common_failure,
    contradicted_tool_results,
    failures,
    no_reward,
    nothing_to_train,
    why_nothing,
)
from agl_core.training.alarms.steps import Watch
from agl_core.training.checkpoints import Checkpoints, RunState
from agl_core.training.evaluate import Evaluated
from agl_core.training.metrics import (
    MetricsLog,
    contrast_metrics,
    drop_metrics,
    episode_metrics,
    staleness_metrics,
    update_metrics,
)
from agl_core.training.progress import Observer, Phase, evaluation_line, step_line
from agl_core.training.rollouts.experience import Drawn, Experience, Source
from agl_core.training.rollouts.plan import plan_train_group
from agl_core.training.session import Session
from agl_core.types import Episode, Rollout, TrainingRecord

Result = TypeVar("Result")


async def uninterrupted(work: Coroutine[Any, Any, Result]) -> Result:
    """Finish `work` even if the caller is cancelled; the cancellation takes effect afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _part(phase: Phase, number: int, count: int) -> Progress:
    """The progress of part `number` of `count` equal parts of a phase."""
    return lambda share: phase.advance((number + share) / count)


@dataclass
class Trainer:
    """One run's training; all parts are passed in, started."""

    loaded: LoadedConfig
    session: Session
    buffer: Buffer
    checkpoints: Checkpoints
    log: MetricsLog
    observer: Observer
    assertions: Sequence[Check] = ()
    """Alarms about what only the agent's side asserts; each is raised once."""
    state: RunState = field(default_factory=RunState)
    watch: Watch = field(default_factory=Watch)
    """Alarms about the numbers of the steps."""
    saved_step: int = 0
    """The step of the latest checkpoint."""
    _latest: Sequence[Episode] = field(default=(), init=False)
    """The rollouts of the latest step."""
    _hook_failures: int = field(default=0, init=False)
    """The failures of lifecycle hooks that metrics have."""
    _resumed: float = field(default_factory=time.monotonic, init=False)
    _credit: Mapping[str, PolicyCredit] = field(init=False)
    _experience: Source = field(init=False)
    _patience: Patience = field(init=False)

    def __post_init__(self) -> None:
        self._credit = {name: PolicyCredit.planned(plan) for name, plan in self.loaded.policies.items()}
        config = self.loaded.config
        self._patience = Patience(config.train.patience)
        self._experience = self._source()

    async def train(self) -> None:
        """Train from where `state` is to the last step. TrainingError if the steps have nothing to train on."""
        settings = self.loaded.config.train
        last = settings.steps
        every = self.loaded.config.eval.every
        self._resumed = time.monotonic() - self.state.seconds
        if every and not self.state.evaluations:
            await self._evaluate()
        try:
            while self.state.step < last:
                step = self.state.step + 1
                started, tokens = time.monotonic(), await self._tokens()
                with self.observer.phase("rollouts", step) as phase:
                    drawn = await self._experience.draw(last - self.state.step, self._draw_context(step), phase)
                await uninterrupted(self._learn(step, drawn, started, tokens))
                if every and (step % every == 0 or step == last):
                    await self._evaluate()
                if step % settings.checkpoint_every == 0 or step == last:
                    await uninterrupted(self.checkpoint())
                await self._after_step()
        finally:
            await self._experience.cancel()

    async def _after_step(self) -> None:
        """Hook for subclasses, called after each step."""

    def _source(self) -> Source:
        """Where the groups of updates come from: rollouts of tasks."""
        return self._of_tasks(self.loaded.config.train.groups_per_step)

    def _of_tasks(self, per_step: int) -> Experience:
        """Groups of rollouts of `[tasks.train]`."""
        settings = self.loaded.config.asynchronous
        return Experience(
            self.session.collector,
            self.buffer,
            partial(self._plan, per_step),
            per_update=per_step,
            in_flight=settings.in_flight or per_step * (settings.max_staleness + 1),
            begun=self.state.groups_begun,
            unfinished=self.state.groups_unfinished,
        )

    def _plan(self, per_step: int, position: int) -> list[Rollout]:
        settings = self.loaded.config.train
        return plan_train_group(
            self.session.tasks["train"],
            position,
            groups_per_step=per_step,
            size=settings.group_size,
            seed=self.loaded.config.seed,
            run=self.session.run,
            restart=self.session.restart,
        )

    @property
    def _min_group_size(self) -> int:
        """Groups with fewer episodes are dropped."""
        settings = self.loaded.config.train
        return min(settings.min_group_size, settings.group_size)  # Groups may be made smaller than that.

    @property
    def _without_logprobs(self) -> bool:
        source = self.session.tasks.get("train")
        return isinstance(source, RecordedTasks) and source.without_logprobs

    def _draw_context(self, step: int) -> DrawContext:
        staleness = self.loaded.config.asynchronous.max_staleness
        return DrawContext(step, self.loaded.config.seed, self.session.versions, staleness, self._min_group_size)

    async def _learn(self, step: int, drawn: Drawn, started: float, tokens: Mapping[str, float]) -> None:
        """Credit, update and record. Once the weights move, the training records have to be stored."""
        settings = self.loaded.config.train
        ages = staleness_metrics(drawn.episodes, self.session.versions)
        prepared = make_batches(
            without_stale(drawn.groups, self.session.versions, self.loaded.config.asynchronous.max_staleness),
            self._credit,
            weights=drawn.weights,
            agents=settings.agents,
            min_group_size=self._min_group_size,
            step=step,
            without_logprobs=self._without_logprobs,
        )
        rolled_out = time.monotonic()
        results = await self._update(step, prepared)
        updated = time.monotonic()
        training_records = await self._record(step, prepared, results, drawn.rollouts)
        alarms = await self._alarms(drawn, training_records)
        drops = Counter(record.dropped for record in training_records if record.dropped)
        idle = sum(record.dropped is None and record.advantage == 0 for record in training_records)
        found = episode_metrics(drawn.new)
        stats = await self.session.engine.stats()
        metrics = {
            **found,
            **contrast_metrics(drawn.groups),
            **ages,
            **drawn.metrics,
            **update_metrics(
                {name: each.metrics for name, each in results.items()}, several=len(self.loaded.policies) > 1
            ),
            **{f"tokens/{key}": value - tokens[key] for key, value in (await self._tokens()).items()},
            **drop_metrics(record.dropped for record in training_records),
            **{f"episodes_dropped/{reason}": float(count) for reason, count in prepared.episodes_dropped.items()},
            "transitions/kept": float(len(training_records) - drops.total()),
            "transitions/dropped": float(drops.total()),
            "transitions/without_advantage": float(idle),
            "transitions/without_logprobs": float(sum((~b.sampled_N).sum() for b in prepared.batches.values())),
            "groups/in_flight": float(drawn.in_flight),
            "groups/carried_over": float(drawn.carried_over),
            "buffer/replayed": float(drawn.replayed),
            "buffer/size": float(drawn.buffered),
            "hooks/failed": float(self._new_hook_failures()),
            "seconds/rollouts": rolled_out - started,
            "seconds/update": updated - rolled_out,
            "seconds/step": time.monotonic() - started,
        }
        stalls = self._stalls()
        alarms += self.watch.look(metrics)
        self.log.write(step, "train", {**metrics, **self.watch.held}, [*alarms, *stalls])
        state = self.state
        state.step = step
        state.groups_begun, state.groups_unfinished = self._experience.begun, self._experience.unfinished
        state.llm_calls += sum(len({t.key.call for t in e.transitions}) for e in drawn.new)
        state.passed_through += int(found["calls/passed_through"])
        state.kept += len(training_records) - drops.total()
        state.without_advantage += idle
        state.count_dropped(drops)
        state.train_rewards.append(found["reward/mean"])
        self.observer.say(step_line(step, settings.steps, metrics, drawn.note))
        self._say(f"step {step}", alarms)
        self._latest = drawn.new
        state.count_endings(drawn.new)
        self._count_memory(stats)
        check_serving(step, {name: each.metrics for name, each in results.items()}, settings.serving_gap)
        self._patience.check(step, why_nothing(drawn.new, training_records, prepared.episodes_dropped))

    async def _alarms(self, drawn: Drawn, training_records: Sequence[TrainingRecord]) -> list[Alarm]:
        seen: dict[Callable[..., str | None], str | None] = {
            no_reward: no_reward(drawn.episodes),
            nothing_to_train: nothing_to_train(drawn.episodes, training_records, self.loaded.config.train.agents),
            **{check: check(drawn.new) for check in (*self.assertions, contradicted_tool_results)},
        }
        self.assertions = [check for check in self.assertions if seen[check] is None]
        alarms = [Alarm.of(check, text) for check, text in seen.items() if text is not None]
        if common_failure(drawn.new) and (failure := await failures(self.session.server.store, drawn.new)):
            alarms.append(failure)
        return self.watch.add(alarms)

    def _stalls(self) -> list[Alarm]:
        """The stalls since this was last asked; they were said when they were seen."""
        stall = self.session.stall
        return [] if stall is None else self.watch.add(stall.take())

    async def _engine(self, work: Awaitable[Result], what: str) -> Result:
        """What the engine answers; an alarm is raised if that takes too long."""
        stall = self.session.stall
        return await (work if stall is None else stall.watched(work, what))

    def _say(self, where: str, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            self.observer.say(f"{where}: {alarm.text}")

    async def _update(self, step: int, prepared: StepBatches) -> dict[str, UpdateResult]:
        """Update every policy that has a batch, each by its own algorithm; the others stay as they are."""
        results: dict[str, UpdateResult] = {}
        with self.observer.phase("update", step) as phase:
            training = [policy for policy in self.loaded.policies if policy in prepared.batches]
            for number, policy in enumerate(training):
                algorithm = self.loaded.policies[policy].algorithm
                update = self.session.engine.update(
                    policy,
                    prepared.batches[policy],
                    algorithm.component.name,
                    to_jsonable_python(algorithm.options.model_dump()),
                    _part(phase, number, len(training)),
                )
                result = results[policy] = await self._engine(update, "an update")
                self.session.versions[policy] = result.version
                self.loaded.plugins.hook.policy_updated(policy=policy, version=result.version, metrics=result.metrics)
        return results

    async def _record(
        self, step: int, prepared: StepBatches, results: Mapping[str, UpdateResult], rollouts: Sequence[Rollout]
    ) -> list[TrainingRecord]:
        """Store the training records, and the step of each rollout, all or nothing.

        The step of a rollout is the one that trained on it, which may differ from the one that it was planned for.
        """
        training_records = [
            TrainingRecord(*key, step=step, credit=credit, advantage=advantage, weight=weight, dropped=reason)
            for policy, result in results.items()
            for key, credit, advantage, weight, reason in zip(
                prepared.batches[policy].keys,
                prepared.batches[policy].values_N.tolist(),
                result.advantage_N.tolist(),
                result.weight_N.tolist(),
                result.dropped,
                strict=True,
            )
        ]
        training_records += prepared.dropped
        moved = [replace(rollout, step=step) for rollout in rollouts if rollout.step != step]
        store = self.session.server.store
        removed = await store.erased([each.id for each in rollouts]) if isinstance(store, ErasableStore) else set()
        await store.put(
            *(each for each in training_records if each.rollout not in removed),
            *(each for each in moved if each.id not in removed),
        )
        return training_records

    def _new_hook_failures(self) -> int:
        """How often lifecycle hooks failed since this was last asked."""
        before, self._hook_failures = self._hook_failures, self.loaded.plugins.hook.failures.total()
        return self._hook_failures - before

    async def _tokens(self) -> dict[str, float]:
        """The engine's counters of tokens prefilled, reused and decoded, since it started."""
        stats = await self._engine(self.session.engine.stats(), "answering")
        return {key.removeprefix("tokens_"): value for key, value in stats.items() if key.startswith("tokens_")}

    async def _evaluate(self) -> Evaluated:
        """Evaluate the weights as they are on every held-out set."""
        step = self.state.step
        evaluated = await self.session.evaluator.evaluate(step)
        alarms = self.watch.wanted(evaluated.alarms)
        self._say(f"step {step}, evaluation", alarms)
        self.state.evaluations += evaluated.entries
        self.state.llm_calls += evaluated.calls
        passed_through = (v for k, v in evaluated.metrics.items() if k.endswith("calls/passed_through"))
        self.state.passed_through += int(sum(passed_through))
        self._count_memory(await self.session.engine.stats())
        if evaluated.entries:
            self.log.write(step, "eval", evaluated.metrics, [*alarms, *self._stalls()])
            self.observer.say(evaluation_line(step, self.loaded.config.train.steps, evaluated.entries))
        return evaluated

    async def checkpoint(self) -> Path:
        """Save everything that resuming needs."""
        self.count_time()
        part = self.checkpoints.begin(self.state.step)
        await self.session.engine.save(part)
        self.saved_step = self.state.step
        folder = await asyncio.to_thread(self.checkpoints.commit, part, self.state)
        await asyncio.to_thread(self.log.keep, self.state.step, folder, self._latest)
        return folder

    def count_time(self) -> None:
        """Bring `state.seconds` up to now."""
        self.state.seconds = time.monotonic() - self._resumed

    def _count_memory(self, stats: Mapping[str, float]) -> None:
        """Resident memory of the run: this process and the engine's."""
        peak = peak_rss_bytes() + int(stats.get("peak_rss_bytes", 0))
        self.state.peak_rss_bytes = max(self.state.peak_rss_bytes, peak)
