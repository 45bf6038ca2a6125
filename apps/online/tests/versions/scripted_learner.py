"""A learner whose engine counts updates, and whose versions are as good as a test says, live and on held-out tasks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import tomli_w
from scripted_run import scripted_config, scripted_session

from agl_core.config.models import RunConfig
from agl_core.learning.rewards import ScoringRule
from agl_core.plugins import Plugins
from agl_core.protocols import Engine, Progress, ResponseScores, UpdateResult, Upstream
from agl_core.testing import episodes as make
from agl_core.types import AttemptKey, Batch, Mode
from agl_online.config import LearnSection
from agl_online.learner import Learner
from agl_online.plugin import users_said
from agl_online.versions import Ledger
from agl_server.builtin import Fifo
from agl_server.store.sqlite import SqliteStore
from agl_server.training.checkpoints import Checkpoints, RunState, read_state
from agl_server.training.evaluation import Evaluated, TaskScore
from agl_server.training.metrics import Observer
from agl_server.training.rollouts import Collector

from .sessions_of_use import Sessions

TASKS = 30


class KilledError(Exception):
    """The process ends here, with nothing written after it."""


class Weights(Engine):
    """An engine: its weights are the steps whose updates made them."""

    def __init__(self, drift: float = 0.0) -> None:
        self.made_by: list[int] = []
        self.batches: list[Batch] = []
        self.drift = drift
        """How much more probable each token of a recorded reply is."""

    async def start(self) -> Upstream:
        return Upstream((), {}, "")

    async def stop(self) -> None: ...

    async def update(self, policy: str, batch: Batch, progress: Progress | None = None) -> UpdateResult:
        self.batches.append(batch)
        self.made_by.append(batch.step)
        nothing = np.zeros(len(batch))
        return UpdateResult(len(self.made_by), {}, nothing, nothing, (None,) * len(batch))

    async def save(self, folder: Path) -> None:
        model = folder / "default" / "model"
        model.mkdir(parents=True)
        (model / "made_by").write_text(json.dumps(self.made_by))

    async def load(self, folder: Path) -> None:
        self.made_by = json.loads((folder / "default" / "model" / "made_by").read_text())

    async def versions(self) -> Mapping[str, int]:
        return {"default": len(self.made_by)}

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

    async def evaluate(self, step: int) -> Evaluated:
        reward = self.tested(self.engine.made_by)
        scores = [TaskScore("eval", "greedy", f"t{n}", (reward,)) for n in range(TASKS)]
        ids, logprobs = np.array([1, 2, 3], dtype=np.int32), np.full(3, -0.5)
        reply = make.transition(prompt_ids=ids, response_ids=ids, logprobs=logprobs)
        replies = {"eval/sampled": [make.episode(reply, mode=Mode.EVAL_SAMPLED)]}
        return Evaluated(metrics={"eval/greedy/reward/mean": reward}, scores=scores, episodes=replies)

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
        config = RunConfig.model_validate(
            {
                "config_version": 1,
                "agent": {"entry": "an_agent:solve"},
                "tasks": {"train": {"source": "numbers"}, "eval": {"source": "numbers"}},
                "policies": {"default": {"model": {"path": "."}}},
                "train": {"steps": steps, "checkpoint_every": 3},
                "eval": {"every": 0},
            }
        )
        section = LearnSection(**{"sessions_per_step": 4, "offline_share": 0.0, "propose_every": 4, **self.learn})
        rules = [ScoringRule("users", users_said, modes=frozenset({Mode.USE}))]
        nobody = cast(Any, None)
        session = scripted_session(
            self.store,
            len(self.engine.made_by),
            restart=self.restarts,
            engine=self.engine,
            collector=Collector(self.store, nobody, rules, {}, Plugins().hook, lambda: None),
            evaluator=SimpleNamespace(evaluate=self.evaluate),
            tasks={"train": []},
        )
        log: Any = SimpleNamespace(write=lambda *_: None, keep=lambda *_: None)
        return _Killable(
            *(scripted_config(config), session, Fifo(), checkpoints, log, Observer()),
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
    """Such a world."""
    run = folder / "run"
    run.mkdir()
    (run / "config.toml").write_text(tomli_w.dumps({"policies": {"default": {"model": {"path": "."}}}}))
    async with SqliteStore(run / "store.sqlite") as store:
        yield World(run, store, Sessions(store, {}), **changes)
