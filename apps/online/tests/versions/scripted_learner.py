"""Sessions in a real store, and a learner of them whose versions are as good as a test says."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import tomli_w
from scripted_run import MINIMAL, CountingEngine, scripted_config, scripted_session

from agl_core.config.models import RunConfig
from agl_core.learning.rewards import ScoringRule
from agl_core.plugins import Plugins
from agl_core.protocols import Progress, ResponseScores, UpdateResult
from agl_core.testing import episodes as make
from agl_core.types import Annotation, AttemptKey, Batch, Call, Ending, Mode, RolloutState, Task
from agl_online.config import LearnSection
from agl_online.experience import SessionExperience, updates_since
from agl_online.learner import Learner
from agl_online.plugin import users_said
from agl_online.versions import Ledger
from agl_server.store.sqlite import SqliteStore
from agl_server.training.checkpoints import Checkpoints, RunState, read_state
from agl_server.training.evaluation import Evaluation, TaskScore
from agl_server.training.metrics import Observer
from agl_server.training.rollouts import Collector, StepGroups


class WaitsError(Exception):
    """The source waits for sessions that do not come."""


@dataclass
class Sessions:
    """A store of sessions, and a source over it that holds some version of the policy."""

    store: SqliteStore
    settings: dict[str, Any]
    step: int = 0
    resets: list[list[int]] = field(default_factory=list)
    engine_version: int = 0
    count: int = 0

    async def end(
        self,
        *,
        thumbs: float | None = 1.0,
        version: int | None = 0,
        name: str | None = None,
        hours_ago: float = 0.0,
        ending: Ending = Ending.FINISHED,
        call: Callable[[Call], Call] = lambda call: call,
    ) -> str:
        self.count += 1
        id = f"use-{self.count:03d}"
        ended = time.time() - hours_ago * 3600
        task = Task(name or id, None, "use", {"application": "shop", "session": name})
        done = {"state": RolloutState.DONE, "counted_attempt": 0, "ending": ending}
        rollout = make.rollout(id, group=name or id, task=task, mode=Mode.USE, **done)
        calls = [] if ending is Ending.NO_CALL else [call(make.call(rollout=id, version=version))]
        await self.store.put(rollout, make.attempt(id, started=ended, ended=ended, ending=ending), *calls)
        if thumbs is not None:
            await self.say(id, thumbs)
        return id

    async def say(self, id: str, thumbs: float) -> None:
        self.count += 1
        feedback = {"rewards": {"thumbs": thumbs}, "note": None}
        await self.store.put(Annotation(id, 0, f"f{self.count}", time.time(), feedback))

    @property
    def collector(self) -> Collector:
        rules = [ScoringRule("users", users_said, modes=frozenset({Mode.USE}))]
        endings = {Ending.LOST: "drop", Ending.NO_CALL: "drop"}
        return Collector(self.store, cast(Any, None), rules, endings, Plugins().hook, lambda: None)

    def source(self, between: Callable[[], Awaitable[None]] | None = None) -> SessionExperience:
        """A learner's source, as after a start; it looks twice for sessions, unless told otherwise."""
        looks = iter(range(2))

        async def look() -> None:
            if next(looks, None) is None:
                raise WaitsError

        versions = {"default": self.engine_version}
        session: Any = SimpleNamespace(collector=self.collector, run="run", versions=versions)
        return SessionExperience(
            *(session, LearnSection(**self.settings), ("*",)),
            since=lambda version: updates_since(version, self.step, self.resets),
            between=between or look,
        )

    async def take(self, source: SessionExperience | None = None) -> StepGroups:
        """The sessions of the next step, which is made with them."""
        no_tasks = AsyncMock(return_value=StepGroups([]))
        with Observer().phase("rollouts", self.step + 1) as phase:
            return await (source or self.source()).draw(self.step + 1, phase, no_tasks)

    async def train(self, taken: StepGroups) -> list[str]:
        """The step is made and recorded; its rollouts."""
        self.step += 1
        self.engine_version += 1
        await self.store.put(*(replace(r, step=self.step) for r in taken.rollouts))
        return [r.id for r in taken.rollouts]


@contextlib.asynccontextmanager
async def sessions(folder: Path, **settings: Any) -> AsyncIterator[Sessions]:
    """Such a store in a folder; `settings` are those of `[learn]`."""
    async with SqliteStore(folder / "store.sqlite") as store:
        yield Sessions(store, {"sessions_per_step": 2, **settings})


TASKS = 30


class KilledError(Exception):
    """The process ends here, with nothing written after it."""


class Weights(CountingEngine):
    """Its weights are the steps whose updates made them."""

    def __init__(self, drift: float = 0.0) -> None:
        super().__init__()
        self.made_by: list[int] = []
        self.drift = drift
        """How much more probable each token of a recorded reply is."""

    async def update(self, policy: str, batch: Batch, progress: Progress | None = None) -> UpdateResult:
        self.made_by.append(batch.step)
        return await super().update(policy, batch, progress)

    async def save(self, folder: Path) -> None:
        model = folder / "default" / "model"
        model.mkdir(parents=True)
        (model / "made_by").write_text(json.dumps(self.made_by))

    async def load(self, folder: Path) -> None:
        self.made_by = json.loads((folder / "default" / "model" / "made_by").read_text())
        self.version = len(self.made_by)

    async def logprobs(self, policy: str, batch: Batch) -> ResponseScores:
        return ResponseScores(batch.behaviour_logprobs_R.astype(np.float64) + self.drift)


@dataclass
class World:
    """A run's folder and store, which outlive its learners."""

    run: Path
    store: SqliteStore
    sessions: Sessions
    tested: Callable[[list[int]], float] = lambda made_by: 0.5
    """The reward on held-out tasks of weights that these steps made."""
    live: Callable[[int], float] = lambda version: 0.5
    """The share of the sessions of a version that get a thumbs up."""
    learn: dict[str, Any] = field(default_factory=dict)
    kill: Callable[[str], bool] = lambda decision: False
    """True to kill the learner right after a decision was written."""
    drift: float = 0.0
    """Of each token's log-probability, from one version to another."""
    serves_on: bool = False
    """True to answer sessions after the last step too."""
    ended: int = 0
    restarts: int = 0
    engine: Weights = field(default_factory=Weights)
    learner: Learner = field(init=False)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.run)

    @property
    def decisions(self) -> list[tuple[int, str]]:
        return [(d.step, str(d.state)) for d in self.ledger.decisions()]

    async def refresh(self) -> None:
        """Sessions end, answered by what the ledger says; every second one by the canary."""
        serving = self.ledger.current().serving
        for _ in range(4):
            self.ended += 1
            version = serving[self.ended % len(serving)]
            happy = (self.ended // len(serving)) % 10 < 10 * self.live(version)
            await self.sessions.end(version=version, thumbs=float(happy))

    async def evaluate(self, step: int) -> Evaluation:
        reward = self.tested(self.engine.made_by)
        scores = [TaskScore("eval", "greedy", f"t{n}", (reward,)) for n in range(TASKS)]
        ids, logprobs = np.array([1, 2, 3], dtype=np.int32), np.full(3, -0.5)
        reply = make.transition(prompt_ids=ids, response_ids=ids, logprobs=logprobs)
        replies = {"eval/sampled": [make.episode(reply, mode=Mode.EVAL_SAMPLED)]}
        return Evaluation(metrics={"eval/greedy/reward/mean": reward}, scores=scores, episodes=replies)

    async def train(self, steps: int) -> None:
        """Start a learner, which goes on from the last checkpoint, and have it train to this step."""
        folder = Checkpoints(self.run / "checkpoints", keep=2)
        checkpoints, self.engine = folder.all(), Weights(self.drift)
        state = RunState()
        if checkpoints:
            state = read_state(checkpoints[-1])
            await self.engine.load(checkpoints[-1])
        self.ledger.begin(state.step, "the start")
        self.learner = self._made(steps, folder, state)
        self.restarts += 1
        await self.learner.train()

    def _made(self, steps: int, checkpoints: Checkpoints, state: RunState) -> Learner:
        source = {"source": "numbers"}
        runs = {"train": {"steps": steps, "checkpoint_every": 3}, "eval": {"every": 0}}
        config = RunConfig.model_validate({**MINIMAL, **runs, "tasks": {"train": source, "eval": source}})
        section = LearnSection(**{"sessions_per_step": 4, "offline_share": 0.0, "propose_every": 4, **self.learn})
        session = scripted_session(
            self.store,
            len(self.engine.made_by),
            restart=self.restarts,
            engine=self.engine,
            collector=self.sessions.collector,
            evaluator=SimpleNamespace(evaluate=self.evaluate),
            tasks={"train": []},
        )
        return _Killable(
            *(scripted_config(config, compares=False), session, checkpoints, MagicMock(), Observer()),
            state=state,
            section=section,
            deployed=cast(Any, self),
            ledger=self.ledger,
            world=self,
        )

    async def used(self) -> dict[str, list[int]]:
        """By session, the steps that its records name."""
        ids = [r.id for r in await self.store.rollouts(mode=Mode.USE)]
        steps: dict[str, list[int]] = {}
        for record in await self.store.training_records([AttemptKey(id, 0) for id in ids]):
            steps.setdefault(record.rollout, []).append(record.step)
        return steps


@dataclass
class _Killable(Learner):
    world: World = field(kw_only=True)

    def _decide(self, decision: Any) -> None:
        super()._decide(decision)
        if self.world.kill(decision.state):
            raise KilledError

    async def _serve_on(self) -> None:
        if self.world.serves_on:
            await super()._serve_on()


@contextlib.asynccontextmanager
async def world(folder: Path, **changes: Any) -> AsyncIterator[World]:
    run = folder / "run"
    run.mkdir()
    (run / "config.toml").write_text(tomli_w.dumps({"policies": {"default": {"model": {"path": "."}}}}))
    async with sessions(run) as of_run:
        yield World(run, of_run.store, of_run, **changes)
