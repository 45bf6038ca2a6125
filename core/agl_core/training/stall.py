"""The alarm on a run in which nothing goes on: when it is raised, and who waits for whom."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from agl_core.learning.tool_results import tool_calls_of
from agl_core.store.interface import Store
from agl_core.training.alarms import Alarm
from agl_core.types import AttemptKey, Call, Ending, Rollout
from agl_core.wire.workers import Activity, RunningAttempt

Result = TypeVar("Result")

SHORTEST, AT_FIRST, TIMES = 30.0, 60.0, 3.0
"""Seconds without an end that are always allowed; as long as nothing has finished; times the longest duration."""
MAX_REMEMBERED = 200
"""Rollouts whose durations count."""
HEALTH_INTERVAL = 2.0
"""Seconds between two looks."""
_MAX_NAMED = 3
"""The most rollouts, or tools, that a sentence names."""
_ENGINE_REMEDY = (
    "See the engine's log in the run's folder, and whether its process was stopped, swaps, or waits for a device. "
    "If it stays so, stop the run (Ctrl-C) and resume it."
)
_PROCESS_REMEDY = (
    "See whether it was stopped, the machine was suspended or swaps, or a reward rule or plugin blocks it."
)


def stall(seconds: float, who_waits: str) -> str:
    """Nothing finished for three times the longest duration of a rollout so far, at least 30 seconds; or for as many
    seconds as you set.

    Training waits, and nothing is learned meanwhile.

    It depends on who waits for whom: ask agl doctor RUN.
    """
    return f"no rollout has finished for {seconds:.0f} s: {who_waits}"


class StallWatch:
    """Raises the alarm when nothing finishes, and says it at once; `setting` is the run's own number of seconds.

    `activity` says what rollouts wait for; `store` has what was recorded of them. Rollouts that ended badly while the
    machine stood still are named, so that they are not scored for it: it does so while the engine leaves a call
    unanswered for as long as an alarm takes, and while this process, which is the gateway too, gets no time.
    """

    def __init__(
        self, activity: Callable[[], Activity], store: Store, say: Callable[[str], None], setting: float | None = None
    ) -> None:
        self._activity, self._store, self._say, self._setting = activity, store, say, setting
        self._alarms: list[Alarm] = []
        self._finished: deque[str] = deque(maxlen=MAX_REMEMBERED)
        self._longest_work = 0.0
        """Seconds that the engine took for something, at most."""
        self._standstills: deque[tuple[float, float]] = deque(maxlen=MAX_REMEMBERED)
        """From and to, in seconds since 1970."""
        self.begin()

    def begin(self) -> None:
        """Rollouts are awaited from now on."""
        self._since, self._limit, self._next_alarm = time.monotonic(), self._setting or SHORTEST, 0.0

    def take(self) -> list[Alarm]:
        """The alarms that were raised since this was last asked."""
        alarms, self._alarms = self._alarms, []
        return alarms

    def _raise(self, seen: str, remedy: str) -> None:
        self._alarms.append(Alarm.of(stall, seen, remedy=remedy))
        self._say(self._alarms[-1].text)

    async def look(self) -> None:
        """Raise the alarm if nothing has finished for too long; again only once that time has doubled."""
        quiet = time.monotonic() - self._since
        if quiet < self._limit:
            return
        self._limit = await self._expected()
        if quiet < self._limit:
            return
        activity = self._activity()
        unanswered = max((attempt.asking or 0.0 for attempt in activity.attempts), default=0.0)
        if (unanswered >= self._limit or not activity.serving) and not self._is_standing_still:
            self._standstills.append((time.time() - quiet, math.inf))
        if quiet >= self._next_alarm:
            self._next_alarm = 2 * quiet
            seen, remedy = await who_waits(activity, self._store)
            self._raise(stall(quiet, seen), remedy)

    async def _expected(self) -> float:
        """The seconds that may pass without an end."""
        if self._setting is not None:
            return self._setting
        attempts = await self._store.attempts(*self._finished)
        durations = [a.ended - a.started for a in attempts if a.ended and a.ending is Ending.FINISHED]
        return max(SHORTEST, TIMES * max(durations)) if durations else AT_FIRST

    def slept(self, seconds: float) -> None:
        """This process did nothing for so long: it was stopped, or blocked."""
        if seconds >= (self._setting or SHORTEST) + HEALTH_INTERVAL:
            if not self._is_standing_still:
                self._standstills.append((time.time() - seconds, time.time()))
            self._raise(f"this process got no time for {seconds:.0f} s, and every agent waited for it", _PROCESS_REMEDY)

    async def watched(self, work: Awaitable[Result], what: str) -> Result:
        """The result of something that the engine does; an alarm if it takes much longer than ever before."""
        task, started = asyncio.ensure_future(work), time.monotonic()
        limit = self._setting or (max(self._longest_work * TIMES, AT_FIRST) if self._longest_work else AT_FIRST * 10)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=limit)
                if not task.done():
                    seconds = time.monotonic() - started
                    seen = f"the engine has not ended {what} for {seconds:.0f} s, and the trainer waits for it"
                    self._raise(seen, _ENGINE_REMEDY)
                    limit *= 2
            return task.result()
        finally:
            task.cancel()
            self._longest_work = max(self._longest_work, time.monotonic() - started)

    async def finished(self, rollouts: Sequence[Rollout]) -> set[str]:
        """These rollouts are done; returns those that timed out or crashed while the machine stood still."""
        hurt = {r.id: r.counted_attempt for r in rollouts if r.ending in (Ending.TIMED_OUT, Ending.CRASHED)}
        attempts = await self._store.attempts(*hurt) if hurt and self._standstills else []
        kept_waiting = {
            attempt.rollout
            for attempt in attempts
            if attempt.attempt == hurt[attempt.rollout]
            if any(attempt.started <= end and begin <= (attempt.ended or math.inf) for begin, end in self._standstills)
        }
        if kept_waiting:
            self._say(
                f"{len(kept_waiting)} rollouts that did not finish are dropped: the machine kept them waiting "
                f"({_listed(sorted(kept_waiting))})"
            )
        finished = [rollout.id for rollout in rollouts if rollout.ending is Ending.FINISHED]
        self._finished.extend(finished)
        if finished and self._is_standing_still:  # The machine goes on.
            self._standstills[-1] = self._standstills[-1][0], time.time()
        self.begin()
        return kept_waiting

    @property
    def _is_standing_still(self) -> bool:
        return bool(self._standstills) and self._standstills[-1][1] == math.inf


async def who_waits(activity: Activity, store: Store) -> tuple[str, str]:
    """Who waits for whom, in words, and what to do; `store` has which tools the latest replies asked for."""
    if not activity.serving:
        return "no engine answers model calls, so that rollouts wait", "Start the trainer, or see why it does not run."
    if not activity.running and not activity.queued:
        return "no rollout is queued or runs: the trainer does something else", "See the log of the trainer."
    if not activity.running:
        return (
            f"no worker runs a rollout, and {activity.queued} wait in the queue",
            "Start a worker: agl worker RUN (docs/workers.md). If there is one, see whether it reaches the server.",
        )
    parts, remedies = [], []
    asking = [attempt for attempt in activity.attempts if attempt.asking is not None]
    if asking:
        longest = max(attempt.asking or 0.0 for attempt in asking)
        parts.append(f"the engine does not answer {_counted(asking, 'model call')}, the oldest for {longest:.0f} s")
        remedies.append(_ENGINE_REMEDY)
    by_tool = await _by_tool([attempt for attempt in activity.attempts if attempt.asking is None], store)
    for tool, attempts in sorted(by_tool.items(), key=lambda item: -len(item[1]))[:_MAX_NAMED]:
        longest = max(attempt.running if attempt.answered is None else attempt.answered for attempt in attempts)
        where, remedy = "without a model call", "See what the agent does between its calls."
        if tool:
            where = f"in the tool '{tool}'"
            remedy = f"See what the tool '{tool}' waits for, and give it a time limit of its own."
        parts.append(f"{_counted(attempts, 'agent')} {where}, the longest for {longest:.0f} s")
        remedies.append(remedy)
    if activity.queued and not activity.waiting:
        workers = {attempt.worker for attempt in activity.attempts}
        oldest = max(attempt.running for attempt in activity.attempts)
        parts.append(
            f"{activity.queued} rollouts wait in the queue, because all workers are busy ({len(workers)} with "
            f"{activity.running} attempts, the oldest since {oldest:.0f} s)"
        )
    if by_tool:
        remedies.append("workers.timeout ends an attempt that takes too long.")
    return "; ".join(parts), " ".join(remedies)


async def _by_tool(attempts: Sequence[RunningAttempt], store: Store) -> Mapping[str, list[RunningAttempt]]:
    """The attempts by each tool that their latest reply asks for; those without one under the empty name."""
    keys = [AttemptKey(attempt.rollout, attempt.attempt) for attempt in attempts]
    latest = {call.key: call for call in await store.calls(keys)}
    by_tool = defaultdict[str, list[RunningAttempt]](list)
    for attempt, key in zip(attempts, keys, strict=True):
        for tool in (key in latest and [*_tools(latest[key])]) or [""]:
            by_tool[tool].append(attempt)
    return by_tool


def _tools(call: Call) -> Iterable[str]:
    """The names of the tools that the replies of a call ask for."""
    for choice in call.choices:
        for tool_call in tool_calls_of(choice.message):
            function = tool_call.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            yield name if isinstance(name, str) else "tool"


def _counted(attempts: Sequence[RunningAttempt], noun: str) -> str:
    rollouts = _listed([attempt.rollout for attempt in attempts])
    return f"{len(attempts)} {noun}{'s' if len(attempts) > 1 else ''} ({rollouts})"


def _listed(rollouts: Sequence[str]) -> str:
    return ", ".join(rollouts[:_MAX_NAMED]) + (", …" if len(rollouts) > _MAX_NAMED else "")
