"""Stalls: when nothing finishes for longer than expected, who waits for whom."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from agl_core.errors import AglError
from agl_core.learning.tool_results import choices_of, tool_calls_of
from agl_core.store.interface import Store
from agl_core.training.alarms import Alarm, raised
from agl_core.types import AlarmName, AttemptKey, Call, Ending, Rollout
from agl_core.wire.trainers import Activity, RunningAttempt

Result = TypeVar("Result")

SHORTEST, AT_FIRST, TIMES = 30.0, 60.0, 3.0
"""Seconds without an end that are always allowed; as long as nothing has finished; times the longest duration."""
_REMEMBERED = 200
"""Rollouts whose durations count."""
HEALTH_INTERVAL = 2.0
"""Seconds between two looks."""
_HURT = frozenset({Ending.TIMED_OUT, Ending.CRASHED})
"""How a rollout ends that waits for too long: it is ended, or its own client gives up."""
_NAMED = 3
"""The most rollouts, or tools, that a sentence names."""


class StallWatch:
    """Raises an alarm when nothing finishes, and says it at once; `setting` is the run's own number of seconds.

    `activity` asks the server what rollouts wait for; `store` has what was recorded of them. It also knows which
    rollouts the machine kept waiting, so that they are not scored for it.
    """

    def __init__(
        self,
        activity: Callable[[], Awaitable[Activity]],
        store: Store,
        say: Callable[[str], None],
        setting: float | None = None,
    ) -> None:
        self._activity, self._store, self._say, self._setting = activity, store, say, setting
        self._ids: deque[str] = deque(maxlen=_REMEMBERED)
        self._since = time.monotonic()
        self._next = 0.0
        self._stalled = False
        self._longest_answer = 0.0
        self._raised: list[Alarm] = []
        self._stalls: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        """When the machine kept rollouts waiting: from and to, in seconds since 1970."""
        self._busy: set[AttemptKey] = set()
        """Attempts that had their replies, and waited for something of their own, such as a tool."""

    def take(self) -> list[Alarm]:
        """The alarms that were raised since this was last asked."""
        taken, self._raised = self._raised, []
        return taken

    def _raise(self, seen: str, remedy: str) -> None:
        alarm = raised(AlarmName.STALL, seen, remedy=remedy)
        self._raised.append(alarm)
        self._say(alarm.text)

    def begin(self) -> None:
        self._since, self._next, self._stalled = time.monotonic(), 0.0, False

    async def finished(self, rollouts: Sequence[Rollout]) -> set[str]:
        """These rollouts are done. The ids of those that the machine kept waiting, and that did not finish for it."""
        kept_waiting = await self._kept_waiting([each for each in rollouts if each.ending in _HURT])
        if kept_waiting:
            self._say(
                f"{len(kept_waiting)} rollouts that did not finish are dropped: the machine kept them waiting "
                f"({', '.join(sorted(kept_waiting)[:_NAMED])}{', …' if len(kept_waiting) > _NAMED else ''})"
            )
        finished = [each.id for each in rollouts if each.ending is Ending.FINISHED]
        self._ids.extend(finished)
        if finished and self._is_kept_waiting:  # The machine goes on.
            self._stalls[-1] = self._stalls[-1][0], time.time()
        self.begin()
        return kept_waiting

    def slept(self, seconds: float) -> None:
        """This process, which is the gateway too, did nothing for so long: it was stopped, or blocked."""
        if seconds >= (self._setting or SHORTEST) + HEALTH_INTERVAL:
            if not self._is_kept_waiting:
                self._stalls.append((time.time() - seconds, time.time()))
            self._raise(f"this process got no time for {seconds:.0f} s, and every agent waited for it", _PROCESS)

    @property
    def _is_kept_waiting(self) -> bool:
        """Whether the machine keeps rollouts waiting now."""
        return bool(self._stalls) and self._stalls[-1][1] == math.inf

    async def _kept_waiting(self, rollouts: Sequence[Rollout]) -> set[str]:
        if not self._stalls or not rollouts:
            return set()
        attempts = {each.key: each for each in await self._store.attempts(*(each.id for each in rollouts))}
        counted = [attempts.get(AttemptKey(each.id, each.counted_attempt or 0)) for each in rollouts]
        return {
            each.rollout
            for each in counted
            if each is not None and each.key not in self._busy
            if any(each.started <= end and begin <= (each.ended or math.inf) for begin, end in self._stalls)
        }

    async def look(self) -> None:
        """Raise the alarm if nothing has finished for too long; later only once that time has doubled."""
        quiet = time.monotonic() - self._since
        is_due = quiet >= self._next
        if quiet < (self._setting or SHORTEST) or not (is_due or self._stalled):
            return
        if not self._stalled and quiet < (expected := await self._expected()):
            self._next = expected
            return
        self._stalled = True
        try:
            activity = await self._activity()
            self._note(activity, quiet)
            if is_due:
                seen, remedy = who_waits(activity, await asked_tools(self._store, activity))
        except AglError as error:
            seen, remedy = f"and the server does not say why ({error})", ""
        if is_due:
            self._next = 2 * quiet
            self._raise(f"no rollout has finished for {quiet:.0f} s: {seen}", remedy)

    def _note(self, activity: Activity, quiet: float) -> None:
        """Which attempts the machine keeps waiting, and which wait for something of their own."""
        asking = {AttemptKey(each.rollout, each.attempt) for each in activity.attempts if each.asking is not None}
        answered = {AttemptKey(each.rollout, each.attempt) for each in activity.attempts if each.answered is not None}
        self._busy = (self._busy | answered) - asking
        if (asking or not activity.serving) and not self._is_kept_waiting:
            self._stalls.append((time.time() - quiet, math.inf))

    async def watched(self, work: Awaitable[Result], what: str) -> Result:
        """The result of something that the engine does; an alarm if it takes much longer than ever before."""
        task, started = asyncio.ensure_future(work), time.monotonic()
        longest = max(self._longest_answer * TIMES, AT_FIRST) if self._longest_answer else AT_FIRST * 10
        limit = self._setting or longest
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=limit)
                if not task.done():
                    quiet = time.monotonic() - started
                    seen = f"the engine has not ended {what} for {quiet:.0f} s, and the trainer waits for it"
                    self._raise(seen, _ENGINE)
                    limit *= 2
            return task.result()
        finally:
            task.cancel()
            self._longest_answer = max(self._longest_answer, time.monotonic() - started)

    async def _expected(self) -> float:
        """The seconds that may pass without an end."""
        if self._setting is not None:
            return self._setting
        attempts = await self._store.attempts(*self._ids)
        durations = [a.ended - a.started for a in attempts if a.ended and a.ending is Ending.FINISHED]
        return max(SHORTEST, TIMES * max(durations)) if durations else AT_FIRST


_ENGINE = (
    "See the engine's log in the run's folder, and whether its process was stopped, swaps, or waits for a device. "
    "If it stays so, stop the run (Ctrl-C) and resume it."
)


_PROCESS = "See whether it was stopped, the machine was suspended or swaps, or a reward rule or plugin blocks it."


async def asked_tools(store: Store, activity: Activity) -> dict[AttemptKey, list[str]]:
    """The tools that the latest reply to each of these attempts asked for."""
    latest: dict[AttemptKey, Call] = {}
    for call in await store.calls([AttemptKey(each.rollout, each.attempt) for each in activity.attempts]):
        latest[call.key] = call
    return {key: list(_tools(call)) for key, call in latest.items()}


def who_waits(activity: Activity, tools: Mapping[AttemptKey, Sequence[str]]) -> tuple[str, str]:
    """Who waits for whom, in words, and what to do. `tools` are those that the latest replies asked for.

    >>> who_waits(Activity(serving=True, queued=8, waiting=0, finished=None, running=0, attempts=[]), {})[0]
    'no worker runs a rollout, and 8 wait in the queue'
    """
    asking = [each for each in activity.attempts if each.asking is not None]
    if not activity.serving:
        return "no engine answers model calls, so that rollouts wait", "Start the trainer, or see why it does not run."
    if not activity.running and not activity.queued:
        return "no rollout is queued or runs: the trainer does something else", "See the log of the trainer."
    if not activity.running:
        return (
            f"no worker runs a rollout, and {activity.queued} wait in the queue",
            "Start a worker: agl worker RUN (docs/apart.md). If there is one, see whether it reaches the server.",
        )
    others = [each for each in activity.attempts if each.asking is None]
    parts, remedies = [], []
    if asking:
        longest = max(each.asking or 0.0 for each in asking)
        parts.append(
            f"the engine does not answer {_count(asking, 'model call')} ({_names(asking)}), the oldest for "
            f"{longest:.0f} s"
        )
        remedies.append(_ENGINE)
    by_tool: dict[str, list[RunningAttempt]] = {}
    for each in others:
        for tool in tools.get(AttemptKey(each.rollout, each.attempt), ()) or ("",):
            by_tool.setdefault(tool, []).append(each)
    for tool, stuck in sorted(by_tool.items(), key=lambda item: -len(item[1]))[:_NAMED]:
        longest = max(each.running if each.answered is None else each.answered for each in stuck)
        doing = f"in the tool '{tool}'" if tool else "without a model call"
        parts.append(f"{_count(stuck, 'agent')} ({_names(stuck)}) {doing}, the longest for {longest:.0f} s")
        remedies.append(
            f"See what the tool '{tool}' waits for, and give it a time limit of its own."
            if tool
            else "See what the agent does between its calls."
        )
    workers = Counter(each.worker for each in activity.attempts)
    if activity.queued and not activity.waiting:
        oldest = max(each.running for each in activity.attempts)
        parts.append(
            f"{activity.queued} rollouts wait in the queue, because all workers are busy ({len(workers)} with "
            f"{activity.running} attempts, the oldest since {oldest:.0f} s)"
        )
    if others:
        remedies.append("workers.timeout ends an attempt that takes too long.")
    return "; ".join(parts), " ".join(dict.fromkeys(remedies))


def _tools(call: Call) -> Iterable[str]:
    for choice in choices_of(call).values():
        for each in tool_calls_of(choice.message):
            function = each.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            yield name if isinstance(name, str) else "tool"


def _count(attempts: Sequence[RunningAttempt], noun: str) -> str:
    return f"{len(attempts)} {noun}{'s' if len(attempts) > 1 else ''}"


def _names(attempts: Sequence[RunningAttempt]) -> str:
    names = ", ".join(each.rollout for each in attempts[:_NAMED])
    return names + (", …" if len(attempts) > _NAMED else "")
