"""The alarm on a run in which nothing goes on: when it is raised, and who waits for whom."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from agl_core.learning.tool_results import tool_calls_of
from agl_core.store.interface import Store
from agl_core.training.alarms import Alarm
from agl_core.types import AttemptKey
from agl_core.wire.workers import Activity, RunningAttempt

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

SHORTEST, ENGINE_SHORTEST, TIMES = 60.0, 600.0, 3.0
"""Seconds without an end that are always allowed to rollouts and to the engine; times the longest wait so far."""
_MAX_NAMED = 3
"""The most rollouts, or tools, that a sentence names."""
_ENGINE_REMEDY = (
    "See the engine's log in the run's folder, and whether its process was stopped, swaps, or waits for a device. "
    "If it stays so, stop the run (Ctrl-C) and resume it."
)


def stall(seconds: float, who_waits: str) -> str:
    """Nothing finished for three times the longest wait for a rollout so far, at least 60 seconds; or for as many
    seconds as you set. Training waits, and nothing is learned meanwhile.

    It depends on who waits for whom: ask agl doctor RUN.
    """
    return f"nothing has finished for {seconds:.0f} s: {who_waits}"


@dataclass
class StallWatch:
    """Raises the alarm when what is waited for takes too long, and says it at once."""

    setting: float | Literal[False] | None = False
    """The run's own number of seconds; None: as many as follow from the run; False: no alarm."""
    explain: Callable[[], Awaitable[tuple[str, str]]] | None = None
    """Who waits for whom while rollouts are awaited, and what to do."""
    say: Callable[[str], None] = logger.warning
    _alarms: list[Alarm] = field(default_factory=list, init=False)
    _longest: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float), init=False)
    """Seconds of the longest wait so far: for a rollout (""), and for what the engine does."""

    def take(self) -> list[Alarm]:
        """The alarms that were raised since this was last asked."""
        alarms, self._alarms = self._alarms, []
        return alarms

    async def watched(self, work: Awaitable[Result], engine_does: str = "") -> Result:
        """The result of a rollout's end, or of something that the engine does; alarms while it takes too long."""
        task, started = asyncio.ensure_future(work), time.monotonic()
        least = ENGINE_SHORTEST if engine_does else SHORTEST
        limit = self.setting or max(least, TIMES * self._longest[engine_does])
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=None if self.setting is False else limit)
                if not task.done():
                    seen, remedy = f"the trainer waits for the engine, {engine_does}", _ENGINE_REMEDY
                    if self.explain is not None and not engine_does:
                        seen, remedy = await self.explain()
                    alarm = Alarm.of(stall, stall(time.monotonic() - started, seen), remedy=remedy)
                    self._alarms.append(alarm)
                    self.say(alarm.text)
                    limit *= 2
            return task.result()
        finally:
            task.cancel()
            waited = time.monotonic() - started
            self._longest[engine_does] = max(self._longest[engine_does], waited)


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
        where = f"in the tool '{tool}'" if tool else "without a model call"
        parts.append(f"{_counted(attempts, 'agent')} {where}, the longest for {longest:.0f} s")
        what = f"what the tool '{tool}' waits for" if tool else "what the agent does between its calls"
        remedies.append(f"See {what}; workers.timeout ends an attempt that takes too long.")
    if activity.queued and not activity.waiting:
        workers = {attempt.worker for attempt in activity.attempts}
        oldest = max(attempt.running for attempt in activity.attempts)
        parts.append(
            f"{activity.queued} rollouts wait in the queue, because all workers are busy ({len(workers)} with "
            f"{activity.running} attempts, the oldest since {oldest:.0f} s)"
        )
    return "; ".join(parts), " ".join(remedies)


async def _by_tool(attempts: Sequence[RunningAttempt], store: Store) -> Mapping[str, list[RunningAttempt]]:
    """The attempts by each tool that their latest reply asks for; those without one under the empty name."""
    keys = [AttemptKey(attempt.rollout, attempt.attempt) for attempt in attempts]
    latest = {call.key: call for call in await store.calls(keys)}
    by_tool = defaultdict[str, list[RunningAttempt]](list)
    for attempt, key in zip(attempts, keys, strict=True):
        choices = latest[key].choices if key in latest else ()
        functions = [tool_call.get("function") for choice in choices for tool_call in tool_calls_of(choice.message)]
        tools = [str(function["name"]) for function in functions if isinstance(function, dict) and "name" in function]
        for tool in tools or [""]:
            by_tool[tool].append(attempt)
    return by_tool


def _counted(attempts: Sequence[RunningAttempt], noun: str) -> str:
    rollouts = ", ".join(attempt.rollout for attempt in attempts[:_MAX_NAMED])
    more = ", …" if len(attempts) > _MAX_NAMED else ""
    return f"{len(attempts)} {noun}{'s' if len(attempts) > 1 else ''} ({rollouts}{more})"
