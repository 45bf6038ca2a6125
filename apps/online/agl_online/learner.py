"""Training on sessions of real use: no version answers them that did not pass the gate and its canary.

    sessions and tasks ──▶ updates ──▶ checkpoint, every `propose_every` steps ──▶ gate ──▶ canary ──▶ stable
                              ▲                                                     │ rejected   │ rolled back
                              └────────── the weights go back to the stable version ┴────────────┘

Steps count on when the weights go back. Ledger and run state alone say where the weights come from, so a learner that
is killed at any point goes on as if it had not been.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agl_core.config.load import CONFIG_FILE, LoadedConfig, store_config
from agl_core.errors import ConfigError
from agl_core.types import AlarmName
from agl_online.config import LearnSection, learn_section
from agl_online.deployed import DeployedVersions
from agl_online.experience import SessionExperience, updates_since
from agl_online.sessions import sessions_of
from agl_online.trials import Outcomes, decide_at_gate, judge_canary, measure_divergence
from agl_online.versions import DecidedBy, Decision, Ledger, LedgerError, State
from agl_server.reading.runs import has_writer
from agl_server.training.checkpoints import CHECKPOINTS, Checkpoints, read_state
from agl_server.training.evaluation import Evaluation
from agl_server.training.loop import Trainer, uninterrupted
from agl_server.training.metrics import Advance, Observer, Summary
from agl_server.training.rollouts import StepGroups
from agl_server.training.run import make_run_dir, train

_STORE = "store.sqlite"
_LOOK = 1.0
"""Seconds between two looks at the canary once nothing is learned any more."""


async def learn(loaded: LoadedConfig, run_dir: Path, observer: Observer) -> Summary:
    """Serve a run's versions and learn from their sessions; a run that was begun goes on from its last checkpoint.

    The first stable version is that, or the first weights. ConfigError without `[learn]`, or if another process has the
    run.
    """
    section = learn_section(loaded)
    if has_writer(run_dir):
        raise ConfigError(
            f"Another process has the run {run_dir}: a run has one learner, which also serves it. Stop that one first, "
            f"or give this run another name (--set name=ANOTHER)."
        )
    if not (run_dir / CONFIG_FILE).exists():
        make_run_dir(run_dir, partial(store_config, loaded.config))
    checkpoints = Checkpoints(run_dir / CHECKPOINTS, keep=1).all()
    step = read_state(checkpoints[-1]).step if checkpoints else 0
    ledger = Ledger(run_dir)
    ledger.begin(step, "It is what the run was deployed with.")
    async with DeployedVersions(run_dir, loaded, section.canary.share, observer.say).running() as deployed:
        return await train(
            loaded,
            run_dir,
            observer,
            resume=(run_dir / _STORE).exists(),
            source=sessions_of(loaded, run_dir, deployed, observer.say),
            trainer_of=partial(Learner, section=section, deployed=deployed, ledger=ledger),
        )


@dataclass
class Learner(Trainer):
    """The training of a run whose versions answer real use."""

    section: LearnSection = field(kw_only=True)
    deployed: DeployedVersions = field(kw_only=True)
    ledger: Ledger = field(kw_only=True)
    stops_without_data = False  # Users who are all content are nothing to learn from.
    _evaluated: dict[int, Evaluation] = field(default_factory=dict, init=False)
    """Evaluations of this restart, by the version that they are of."""
    _sessions: SessionExperience = field(init=False)
    _outcomes: Outcomes = field(init=False)

    def __post_init__(self) -> None:
        # What an earlier version sampled is bound to have other log-probabilities.
        self.watch.settings = {AlarmName.LOGPROB_GAP: False, **self.watch.settings}
        self._outcomes = Outcomes(self.session)
        self._sessions = SessionExperience(
            self.session,
            self.section,
            self.loaded.config.train.agents,
            since=lambda version: updates_since(version, self.state.step, self.state.resets),
            between=self._decide_canary,
        )
        super().__post_init__()

    @property
    def _groups_per_step(self) -> int:
        return self.section.groups_of_tasks

    async def _draw(self, step: int, advance: Advance) -> StepGroups:
        return await self._sessions.draw(step, advance, partial(super()._draw, step, advance))

    async def train(self) -> None:
        """Train to the last step, and then answer sessions until this is cancelled."""
        if not self.checkpoints.all():
            await uninterrupted(self.checkpoint())  # What the weights can go back to.
        await self._follow()
        if self.ledger.current().state(self.state.step) is State.CANDIDATE:
            await self._decide_at_gate()  # The learner was killed before the gate decided.
        await super().train()
        await self._serve_on()

    async def _serve_on(self) -> None:
        self.observer.say(
            f"{self.stopped or f'train.steps = {self.loaded.config.train.steps} is reached'}, so nothing more is "
            f"learned. The versions go on answering sessions, and a canary is decided on, until Ctrl-C. A higher "
            f"train.steps learns on."
        )
        while True:
            await self._decide_canary()
            await asyncio.sleep(_LOOK)

    async def _after_step(self) -> None:
        await self._decide_canary()
        versions = self.ledger.current()
        is_free = versions.canary is None and versions.passed is None
        if self.state.step % self.section.propose_every == 0 and is_free:
            if self.saved_step != self.state.step:
                await uninterrupted(self.checkpoint())
            reason = f"The weights after step {self.state.step} are proposed."
            self._decide(Decision(self.state.step, State.CANDIDATE, DecidedBy.TRAINING, reason))
            await self._decide_at_gate()

    async def _decide_at_gate(self) -> None:
        """Have the gate decide on the present weights, which are those of the last checkpoint."""
        step, stable = self.state.step, self.ledger.current().stable
        assert stable is not None, "the run is deployed"
        candidate = await self._evaluation_of(step)
        incumbent = await self._evaluation_of(stable)
        [policy] = self.loaded.policies
        agents = self.loaded.config.train.agents
        divergence = await measure_divergence(self.session.engine, policy, incumbent.episodes, agents)
        decision = decide_at_gate(step, candidate, incumbent, self.section.gate, divergence=divergence)
        self._evaluated = {step: candidate, stable: incumbent}
        self._decide(decision)
        await self._decide_canary()

    async def _decide_canary(self) -> None:
        """Decide on the canary if the sessions say so, or begin one, and follow all decisions, an operator's too."""
        await self.session.engine.versions()  # EngineError if it was lost.
        versions = self.ledger.current()
        try:
            if (canary := versions.canary) is not None:
                assert versions.stable is not None, "the run is deployed"
                outcomes = await self._outcomes.since(versions.decided[canary].time, versions.serving)
                decision = judge_canary(canary, versions.stable, outcomes, self.section.canary)
                if decision is not None:
                    self._decide(decision)
            elif versions.passed is not None:
                state, reason = State.STABLE, "It passed the gate, and there is to be no canary."
                if share := self.section.canary.share:
                    state, reason = State.CANARY, f"It answers {share:.0%} of the sessions."
                self._decide(Decision(versions.passed, state, DecidedBy.GATE, reason))
        except LedgerError as error:  # An operator decided meanwhile.
            self.observer.say(str(error))
        await self._follow()
        await self.deployed.refresh()

    async def _follow(self) -> None:
        """Take the weights back to the stable version if they come from a later one that was given up."""
        versions, state = self.ledger.current(), self.state
        assert versions.stable is not None, "the run is deployed"
        since_stable = updates_since(versions.stable, state.step, state.resets)
        refused = (
            step
            for step in versions.decided
            if versions.state(step) in (State.REJECTED, State.ROLLED_BACK)
            and (updates := updates_since(step, state.step, state.resets)) is not None
            and (since_stable is None or updates < since_stable)
        )
        latest = max(refused, default=None)
        if latest is None:
            return
        await uninterrupted(self._load(versions.stable))
        state.resets.append([state.step, versions.stable])
        self.observer.say(
            f"step {state.step}: version {latest} was given up; the weights are those of version {versions.stable}"
        )

    async def _load(self, version: int) -> None:
        await self.session.engine.load(self.checkpoints.path(version))
        self.session.versions.update(await self.session.engine.versions())

    async def _evaluation_of(self, version: int) -> Evaluation:
        """The evaluation of a version on the held-out tasks; afterwards the weights are as they were."""
        now = self.state.step
        if version == now:
            return await self._evaluate()
        if version not in self._evaluated:
            await uninterrupted(self._load(version))
            try:
                self._evaluated[version] = await self.session.evaluator.evaluate(version)
            finally:
                await uninterrupted(self._load(now))
        return self._evaluated[version]

    async def _evaluate(self) -> Evaluation:
        if self.state.step not in self._evaluated:
            self._evaluated[self.state.step] = await super()._evaluate()
        return self._evaluated[self.state.step]

    def _decide(self, decision: Decision) -> None:
        self.ledger.record(decision)
        self.observer.say(f"version {decision.step} {decision.state} (by {decision.by}): {decision.reason}")
