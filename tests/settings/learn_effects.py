"""Effects of how sessions of real use are learned from."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from agl_core.plugins import Plugins
from agl_core.store.sqlite import SqliteStore
from agl_core.testing import episodes as make
from agl_core.training.metrics import Observer
from agl_core.training.rollouts import Collector, scoring_rules
from agl_core.types import Attempt, Ending, Episode, Mode, Rollout, RolloutState, Task
from agl_online.config import learn_section
from agl_online.experience import SessionSource, Taken
from agl_online.feedback import Feedback

from .settings_bench import Bench, Effect, Given

UPDATES, OLD_HOURS, RECENT_MINUTES = 20, 10.0, 1.0
"""Since the version that answered the sessions; since the end of the one that ended long ago, and of the others."""


class EnoughError(Exception):
    """What has not happened in the first look does not happen."""


def taking(look: Callable[[Taken | None], Any]) -> Callable[[Bench, Given], Awaitable[Any]]:
    """Look at what the first step takes of some sessions; None: it waits for more."""

    async def observe(bench: Bench, given: Given) -> Any:
        loaded = bench.load(given)
        path = bench.folder / f"sessions-{time.monotonic_ns()}" / "store.sqlite"
        path.parent.mkdir()
        async with SqliteStore(path) as store:
            for number in range(6):
                await _end(store, number)
            rules = scoring_rules(loaded)
            collector = Collector(store, cast(Any, None), rules, {}, Plugins().hook, lambda: None)
            looks = 0

            async def between() -> None:
                nonlocal looks
                looks += 1
                if looks > 1:
                    raise EnoughError

            source = SessionSource(
                *(store, collector, "run", learn_section(loaded), ("*",)),
                versions={"default": UPDATES},
                since=lambda version: UPDATES - version,
                between=between,
            )
            with Observer().phase("rollouts", 1) as phase:
                try:
                    return look(await source.take(1, phase))
                except EnoughError:
                    return look(None)

    return observe


async def _end(store: SqliteStore, number: int) -> None:
    """A session that got a thumbs up; the first ended long ago, the last is another application's."""
    id, application = f"use-{number}", "mail" if number == 5 else "shop"
    ended = time.time() - (OLD_HOURS * 3600 if number == 0 else RECENT_MINUTES * 60)
    name = "talk" if number < 4 else id
    task = Task(name, None, "use", {"application": application})
    rollout = Rollout(id, "run", 0, name, task, Mode.USE, 0, 0, RolloutState.DONE, 0, Ending.FINISHED)
    attempt = Attempt(id, 0, application, ended, ended, Ending.FINISHED)
    said = Feedback(id, "f", ended, {"thumbs": 1.0}).annotation
    await store.put(rollout, attempt, make.call(rollout=id, version=0), said)


def decided(taken: Taken | None) -> list[tuple[str, str | None]]:
    return [] if taken is None else [(each.rollout.id, each.episode.dropped) for each in taken.scored]


def groups_of_tasks(bench: Bench, given: Given) -> int:
    learn = learn_section(bench.load(given))
    return learn.groups_of_tasks


def proposals(bench: Bench, given: Given) -> list[int]:
    learn = learn_section(bench.load(given))
    return [step for step in range(1, 50) if learn.is_due(step)]


def what_users_said(bench: Bench, given: Given) -> Any:
    rule = bench.load(given).rewards["users"].build()
    said = Feedback("r", "f", 0.0, {"thumbs": 1.0, "helpful": 0.0}).annotation
    return rule(make.episode(make.transition(), mode=Mode.USE, annotations=(said,)))  # type: ignore[operator]


async def who_is_scored(bench: Bench, given: Given) -> list[bool]:
    """Whether the rule says anything of a task's rollout, and of a session."""
    [rule] = [each for each in scoring_rules(bench.load(given)) if each.name == "exact_match"]
    episodes: list[Episode] = [make.episode(mode=mode) for mode in (Mode.TRAIN, Mode.USE)]
    return [each.mode in rule.modes for each in episodes]


GIVEN: Given = {
    "online": {"applications": {"shop": 1, "mail": 1}},
    "learn": {"sessions_per_step": 4},
    "rewards": {"users": {"rule": "feedback", "modes": ["use"]}},
}


def _with(**settings: Any) -> Given:
    return {**GIVEN, "learn": {"sessions_per_step": 4, **settings}}


EFFECTS: Mapping[str, Effect] = {
    "learn.sessions_per_step": Effect(taking(decided), _with(sessions_per_step=5), GIVEN),
    "learn.offline_share": Effect(groups_of_tasks, _with(offline_share=0.5), GIVEN),
    "learn.max_staleness": Effect(taking(decided), _with(max_staleness=UPDATES - 1), GIVEN),
    "learn.propose_every": Effect(proposals, _with(propose_every=7), GIVEN),
    "rewards.NAME.modes": Effect(who_is_scored, {"rewards.exact_match.modes": ["train", "use"]}),
    "reward.feedback.weights": Effect(
        what_users_said, {"rewards.users.weights": {"helpful": 3.0}}, {"rewards.users": {"rule": "feedback"}}
    ),
}
