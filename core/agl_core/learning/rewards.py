"""Reward rules over a recorded episode, with provenance; each is called off the event loop, within its time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import inspect
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from agl_core.capture import describe_error
from agl_core.errors import AglError, own_line
from agl_core.processes.sandbox import SANDBOX_SECONDS, IsolatedRule, SandboxLimitError
from agl_core.protocols import GroupRewardRule, RewardRule, RewardValue
from agl_core.types import DropReason, Ending, Episode, Json, Mode, Reward, TransitionKey, are_equal

Argument = TypeVar("Argument")

AGENT_SOURCE = "agent"

_SECONDS = 60.0
"""The time limit of a function, which computes."""
_SECONDS_TO_WAIT = 600.0
"""The time limit of an async function, which waits: for a server, and for its turn there."""
_TOO_LONG = "it took longer than {:g} seconds; its table's `time_limit` allows more"
_GRACE = 1.0
"""Seconds for an event loop to show that it still runs."""
_LARGEST = float(np.finfo(np.float32).max)
"""The largest number of single precision, in which advantages are computed; a larger reward would be infinite."""


def reported(episode: Episode) -> list[Reward]:
    """The rewards that the agent itself reported (`agl_core.reward`): the rule of a run that names none.

    The terminal reward is a sum; each choice of a call has the reward of the call. Calls that do not count have none.
    """
    said = [r for r in episode.rewards if r.source == AGENT_SOURCE]
    values = [r.value for r in said if r.call is None]
    terminal = [_reward(episode, "reported", math.fsum(values), AGENT_SOURCE)] if values else []
    of_calls = [replace(r, choice=t.key.choice) for t in episode.transitions for r in said if r.call == t.key.call]
    return [*terminal, *of_calls]


@dataclass(frozen=True, slots=True)
class ScoringRule:
    name: str
    """The name of its table, and the provenance of its rewards."""
    rule: RewardRule | GroupRewardRule
    weight: float = 1.0
    """Its share in the terminal reward."""
    modes: frozenset[Mode] = frozenset(Mode)
    time_limit: float | None = None
    """Seconds for one call of it; None: the default of its kind (`_call`)."""


_AT_ONCE = 16
"""Calls of an async rule under way at a time: a hosted model takes more, a small service is busy with these."""

_TURNS = WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[asyncio.Lock, defaultdict[str, asyncio.Semaphore]]]()
"""For functions, one at a time, and for each async rule; waiting for a turn is no time of the rule's."""


async def score_all(
    episodes: Sequence[Episode], rules: Sequence[ScoringRule], endings: Mapping[Ending, float | Json]
) -> list[tuple[Episode, list[Exception]]]:
    """`score` for each episode, in their order, many at the same time."""
    return list(await asyncio.gather(*(score(episode, rules, endings) for episode in episodes)))


async def score(
    episode: Episode, rules: Sequence[ScoringRule], endings: Mapping[Ending, float | Json]
) -> tuple[Episode, list[Exception]]:
    """The episode with its rewards: the terminal reward is Σ weight · value over the rules that returned a value.

    `endings` maps the rollout's ending to "score" (the rules score it), a number (its fixed terminal reward) or "drop".
    An episode dropped for its ending or a stall is returned as it is. A rule that raises, gives a value that is not
    finite in single precision, or rewards a call that the episode does not have, drops the episode. A rule of weight 0
    only observes and drops nothing. An isolated rule that exceeds a limit, or whose process ends, gives 0: otherwise a
    text could choose to be dropped. All these exceptions are returned, with a note naming rule and rollout. A rollout
    that was opened from outside is dropped if no rule with a weight has a value.
    """
    if episode.dropped in (DropReason.ENDING, DropReason.STALLED):
        return episode, []
    treatment = endings.get(episode.ending, "score")
    if treatment == "drop":
        return replace(episode, dropped=DropReason.ENDING), []
    if treatment != "score":
        fixed = _reward(episode, episode.ending.value, float(treatment), "endings")
        return replace(episode, rewards=(*episode.rewards, fixed), terminal=fixed.value), []
    judging = _EpisodeScores(episode)
    for scoring in rules:
        if isinstance(scoring.rule, GroupRewardRule) or episode.mode not in scoring.modes:
            continue
        try:
            judging.give(scoring, await _call(scoring, scoring.rule, episode))
        except SandboxLimitError as error:
            judging.give(scoring, 0.0)
            judging.report(scoring, error)
        except Exception as error:
            judging.fail(scoring, error)
    return judging.result(), judging.errors


async def score_groups(
    scored: Sequence[tuple[Episode, list[Exception]]],
    rules: Sequence[ScoringRule],
    endings: Mapping[Ending, float | Json],
    elsewhere: bool = False,
) -> list[tuple[Episode, list[Exception]]]:
    """The rewards of `score` for whole groups, with those of the rules that see a group at once; in the same order.

    Such a rule sees the episodes of a group as the others rewarded them, without those that were dropped or have a
    fixed reward. If it fails, all of them are dropped. Each rollout of an evaluation is a group, even of a repeated
    task, unless it was recorded `elsewhere`.
    """
    together = [scoring for scoring in rules if isinstance(scoring.rule, GroupRewardRule)]
    if not together:
        return list(scored)
    compared = {
        place: _EpisodeScores(episode)
        for place, (episode, _) in enumerate(scored)
        if episode.dropped is None and endings.get(episode.ending, "score") == "score"
    }
    groups: dict[tuple[Mode, str], list[_EpisodeScores]] = {}
    for scores in compared.values():
        episode = scores.episode
        name = episode.rollout if episode.mode.evaluates and not elsewhere else episode.group
        groups.setdefault((episode.mode, name), []).append(scores)
    fitting = {mode: [scoring for scoring in together if mode in scoring.modes] for mode, _ in groups}
    await asyncio.gather(*(_compare(group, fitting[mode]) for (mode, _), group in groups.items()))
    return [
        (compared[place].result(), [*errors, *compared[place].errors]) if place in compared else (episode, errors)
        for place, (episode, errors) in enumerate(scored)
    ]


async def try_rules(
    episodes: Sequence[Episode],
    rules: Sequence[ScoringRule],
    endings: Mapping[Ending, float | Json],
    elsewhere: bool = True,
) -> tuple[list[Episode], list[str]]:
    """The episodes of whole groups with their rewards, and the errors of rules in words, equal ones once."""
    scored = await score_groups(await score_all(episodes, rules, endings), rules, endings, elsewhere)
    alike: dict[str, str] = {}
    for error in (error for _, errors in scored for error in errors):
        rule = error.__notes__[-1].partition(" failed on ")[0]
        alike.setdefault(f"{rule}: {describe_error(error)}", failure_text(error))
    return [episode for episode, _ in scored], [*alike.values()]


async def _compare(group: Sequence[_EpisodeScores], rules: Sequence[ScoringRule]) -> None:
    for scoring in rules:
        assert isinstance(scoring.rule, GroupRewardRule)
        try:
            values = list(await _call(scoring, scoring.rule.reward, [scores.episode for scores in group]))
            if len(values) != len(group):
                raise ValueError(f"it gave {len(values)} values for {len(group)} episodes; one for each is needed")
        except Exception as error:
            for scores in group:
                scores.fail(scoring, error, of_group=scores is not group[0])
            continue
        for scores, value in zip(group, values, strict=True):
            try:
                scores.give(scoring, value)
            except Exception as error:
                scores.fail(scoring, error)


class _EpisodeScores:
    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.errors: list[Exception] = []
        self._failed = False
        self._given: list[tuple[float, Reward]] = []
        """Rewards, each with the weight of its rule."""

    def give(self, scoring: ScoringRule, value: RewardValue) -> None:
        """Note what a rule gave. ValueError if it cannot be a reward."""
        rewards = _as_rewards(self.episode, scoring.name, value)
        if endless := [reward for reward in rewards if not _are_finite([reward.value])]:
            where = "" if endless[0].name == scoring.name else f" for '{endless[0].name}'"
            error = ValueError(f"it gave {endless[0].value}{where}, which is no finite number in single precision")
            if scoring.weight == 0:
                raise error
            self.report(scoring, error)
        self._given += [(scoring.weight, reward) for reward in rewards]

    def fail(self, scoring: ScoringRule, error: Exception, *, of_group: bool = False) -> None:
        """A rule failed; an error `of_group` names the first rollout of its group."""
        self.report(scoring, error, of_group)
        self._failed = self._failed or scoring.weight != 0

    def report(self, scoring: ScoringRule, error: Exception, is_named: bool = False) -> None:
        if not is_named:
            error.add_note(f"The reward rule '{scoring.name}' failed on rollout {self.episode.rollout}.")
        self.errors.append(error)

    def result(self) -> Episode:
        """The episode with the rewards, or dropped; if a rule failed, with those of the others."""
        if not self._failed and self.episode.mode is Mode.USE and not any(weight for weight, _ in self._given):
            return replace(self.episode, terminal=None, dropped=self.episode.dropped or DropReason.NO_REWARD)
        terminal = [(weight, reward) for weight, reward in self._given if reward.call is None]
        total = (self.episode.terminal or 0.0) + sum(weight * reward.value for weight, reward in terminal)
        by_call = defaultdict[tuple[str | None, int], list[Reward]](list)
        for weight, reward in self._given:
            by_call[reward.call, reward.choice].append(replace(reward, value=weight * reward.value))
        weighted = (reward.value for rewards in by_call.values() for reward in rewards)
        finite = _are_finite([total, *(reward.value for _, reward in terminal), *weighted])
        dropped = DropReason.REWARD_FAILED if self._failed else self.episode.dropped
        return replace(
            self.episode,
            rewards=(*self.episode.rewards, *(reward for _, reward in terminal)),
            terminal=total if finite and not self._failed else None,
            transitions=tuple(
                replace(t, rewards=(*t.rewards, *by_call[t.key.call, t.key.choice])) for t in self.episode.transitions
            ),
            dropped=dropped if finite else dropped or DropReason.NON_FINITE,
        )


def failure_text(error: Exception) -> str:
    """An exception that a rule raised, in words: the rule, a rollout, and the line of the rule that did."""
    line = "" if isinstance(error, AglError) else own_line(error, __file__)
    return f"{error.__notes__[-1]} {describe_error(error)}{f' ({line})' if line else ''}"


def was_rewarded(episode: Episode) -> bool:
    """True if a rule, or the table of endings, gave it a value."""
    return any(r.source != AGENT_SOURCE for r in episode.rewards) or any(t.rewards for t in episode.transitions)


def normalized(group: Sequence[Episode], weights: Mapping[str, float]) -> list[Episode]:
    """The group with the terminal rewards Σ_k w_k · (r_ik − μ_k) / (σ_k + 1e-6) (GDPO, arXiv 2601.05242, section 3).

    r_ik is the reward of rollout i by the name k, and 0 without one; μ_k and σ_k (unbiased) are the group's; w_k is the
    weight of its rule. An agent's reports count by the rule that reads them.
    """
    totals = np.zeros(len(group))
    sources = {r.name: r.source for episode in group for r in episode.rewards if r.source != AGENT_SOURCE}
    for name, source in sources.items():
        named = ((r.value for r in episode.rewards if r.name == name and r.source == source) for episode in group)
        values = np.array([next(found, 0.0) for found in named])
        if not are_equal(values.tolist()):
            totals += weights.get(source, 1.0) * (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    return [replace(episode, terminal=total) for episode, total in zip(group, totals.tolist(), strict=True)]


def _are_finite(values: Iterable[float]) -> bool:
    """True if all are, in single precision."""
    return all(abs(value) <= _LARGEST for value in values)


def _as_rewards(episode: Episode, name: str, value: RewardValue) -> list[Reward]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return _added([_of_part(episode, name, part, _number(number)) for part, number in value.items()])
    if isinstance(value, Sequence) and all(isinstance(reward, Reward) for reward in value):
        return _added([_checked(episode, reward, name) for reward in value])
    return [_reward(episode, name, _number(value), name)]


def _number(value: object) -> float:
    """A number of any library. ValueError for what is none, also for a text of digits: it is more likely an answer."""
    if not isinstance(value, str | bytes):
        with contextlib.suppress(TypeError, ValueError):
            return float(value)  # type: ignore[arg-type]
    raise ValueError(f"it gave {value!r:.200}, which is no number")


def _of_part(episode: Episode, name: str, part: str | TransitionKey, value: float) -> Reward:
    """A component of the terminal reward, or the reward of one call."""
    if isinstance(part, str):
        return _reward(episode, f"{name}.{part}", value, name)
    return _checked(episode, Reward(part.rollout, part.attempt, name, value, name, part.call, part.choice), name)


def _added(rewards: Sequence[Reward]) -> list[Reward]:
    """Rewards with the same name for one choice add up, because the store keeps one of each."""
    totals: dict[tuple[str, str | None, int], Reward] = {}
    for reward in rewards:
        key = (reward.name, reward.call, reward.choice)
        totals[key] = replace(reward, value=totals[key].value + reward.value) if key in totals else reward
    return list(totals.values())


def _checked(episode: Episode, reward: Reward, source: str) -> Reward:
    """A reward that a rule made itself, with the episode's keys. ValueError if the episode does not have its call."""
    calls = {(t.key.call, t.key.choice) for t in episode.transitions}
    if reward.call is not None and (reward.call, reward.choice) not in calls:
        raise ValueError(
            f"it rewards choice {reward.choice} of call {reward.call!r}, which the episode does not have; take "
            f"`call` and `choice` from the `key` of one of `episode.transitions`"
        )
    return replace(reward, rollout=episode.rollout, attempt=episode.attempt, value=_number(reward.value), source=source)


def _reward(episode: Episode, name: str, value: float, source: str) -> Reward:
    return Reward(rollout=episode.rollout, attempt=episode.attempt, name=name, value=value, source=source)


async def _call(scoring: ScoringRule, rule: Callable[[Argument], Any], argument: Argument) -> Any:
    """The value of a rule. TimeoutError if it takes longer than its time limit, or than the default of its kind.

    A function is called in a thread; an async one runs on the event loop of all rules. So a rule that never returns
    costs its own time, not the server's. A thread cannot be ended while it is inside a single call of C code, nor do
    others run if that holds Python's lock, as `re` does: such a rule belongs in a sandbox.
    """
    time_limit = scoring.time_limit
    if isinstance(rule, IsolatedRule):
        return await rule(argument, time_limit or SANDBOX_SECONDS)  # type: ignore[arg-type]
    turns = asyncio.Lock(), defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(_AT_ONCE))
    computing, waiting = _TURNS.setdefault(asyncio.get_running_loop(), turns)
    value: concurrent.futures.Future[Any] = concurrent.futures.Future()
    value.set_running_or_notify_cancel()

    def run() -> None:
        try:
            value.set_result(rule(argument))
        except Exception as error:
            value.set_exception(error)
        except SystemExit:  # Its own, or that of `_interrupt`.
            value.set_exception(RuntimeError("it raised SystemExit"))

    async with computing:
        # No executor's: Python waits for their threads at its end, which a rule that never returns would prevent.
        thread = threading.Thread(target=run, name="agl-rule", daemon=True)
        thread.start()
        if not await _ended(value, seconds := time_limit or _SECONDS):
            _interrupt(thread)
            raise TimeoutError(_TOO_LONG.format(seconds))
    if not inspect.isawaitable(value.result()):
        return value.result()

    async def awaited() -> Any:
        try:
            return await value.result()
        except SystemExit:
            raise RuntimeError("it raised SystemExit") from None

    async with waiting[scoring.name]:
        loop, thread = _rules_loop()
        running = asyncio.run_coroutine_threadsafe(awaited(), loop)
        if await _ended(running, seconds := time_limit or _SECONDS_TO_WAIT):
            return running.result()
    running.cancel()
    alive: concurrent.futures.Future[None] = concurrent.futures.Future()
    loop.call_soon_threadsafe(alive.set_result, None)
    if not await _ended(alive, _GRACE):
        _rules_loop.cache_clear()  # The rule computes instead of waiting: the others get another loop.
        _interrupt(thread)
    raise TimeoutError(_TOO_LONG.format(seconds))


async def _ended(future: concurrent.futures.Future[Any], seconds: float) -> bool:
    """True if it is done within this time."""
    done, _ = await asyncio.wait({waiting := asyncio.wrap_future(future)}, timeout=seconds)
    if done:
        waiting.exception()  # The caller reads it from `future`.
    return bool(done)


@cache
def _rules_loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="agl-rules", daemon=True)
    thread.start()
    return loop, thread


def _interrupt(thread: threading.Thread) -> None:
    """Raise SystemExit in it, as soon as it executes Python code again.

    Until then Python 3.11 looks for an exception in every thread, at every turn; a thread with a trace function never
    gets past the start of a function. An exception that is caught here ends that; the other stays for `thread`.
    """
    raise_in, exception = ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.py_object(SystemExit)

    def interrupt() -> None:
        with contextlib.suppress(SystemExit):
            raise_in(ctypes.c_ulong(thread.ident or 0), exception)
            raise_in(ctypes.c_ulong(threading.get_ident()), exception)
            while True:
                pass

    threading.Thread(target=interrupt, name="agl-interrupt", daemon=True).start()
