"""Sessions in a real store, as the server records them, and a source of experience over it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from agl_core.learning.rewards import ScoringRule
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.types import Annotation, Attempt, Call, Ending, Mode, Rollout, RolloutState, Task
from agl_online.config import LearnSection
from agl_online.experience import SessionExperience, updates_since
from agl_online.plugin import users_said
from agl_server.store.sqlite import SqliteStore
from agl_server.training.metrics import Observer
from agl_server.training.rollouts import Collector, Drawn

NOTHING: Mapping[Ending, float | str] = {Ending.LOST: "drop", Ending.NO_CALL: "drop"}


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
        application: str = "shop",
        hours_ago: float = 0.0,
        ending: Ending = Ending.FINISHED,
        call: Callable[[Call], Call] = lambda call: call,
    ) -> str:
        """A session has ended."""
        self.count += 1
        id = f"use-{self.count:03d}"
        ended = time.time() - hours_ago * 3600
        task = Task(name or id, None, "use", {"application": application, "session": name})
        rollout = Rollout(
            id, "run", 0, name or id, task, Mode.USE, 0, 0, RolloutState.DONE, counted_attempt=0, ending=ending
        )
        calls = [] if ending is Ending.NO_CALL else [call(make.call(rollout=id, version=version))]
        await self.store.put(rollout, Attempt(id, 0, application, ended, ended, ending), *calls)
        if thumbs is not None:
            await self.say(id, thumbs)
        return id

    async def say(self, id: str, thumbs: float) -> None:
        """Feedback comes."""
        self.count += 1
        feedback = {"rewards": {"thumbs": thumbs}, "note": None}
        await self.store.put(Annotation(id, 0, f"f{self.count}", time.time(), feedback))

    def source(self, between: Callable[[], Awaitable[None]] | None = None) -> SessionExperience:
        """A learner's source, as after a start."""
        rules = [ScoringRule("users", users_said, modes=frozenset({Mode.USE}))]
        nobody = cast(Any, None)
        collector = Collector(self.store, nobody, rules, NOTHING, Plugins().hook, lambda: None)
        session: Any = SimpleNamespace(collector=collector, run="run", versions={"default": self.engine_version})
        return SessionExperience(
            *(session, LearnSection(**self.settings), ("*",)),
            since=lambda version: updates_since(version, self.step, self.resets),
            between=between or self._once(),
        )

    async def _no_tasks(self) -> Drawn:
        return Drawn([])

    def _once(self) -> Callable[[], Awaitable[None]]:
        looks = 0

        async def between() -> None:
            nonlocal looks
            looks += 1
            if looks > 2:
                raise WaitsError

        return between

    async def take(self, source: SessionExperience | None = None) -> Drawn:
        """The sessions of the next step, which is made with them."""
        with Observer().phase("rollouts", self.step + 1) as phase:
            return await (source or self.source()).draw(self.step + 1, phase, self._no_tasks)

    async def train(self, taken: Drawn) -> list[str]:
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
