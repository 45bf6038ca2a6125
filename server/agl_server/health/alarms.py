"""Looks at a run: the alarms on the numbers of its steps, on their rollouts, and on how long it waits for what."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from agl_core.config.load import LoadedConfig
from agl_core.kinds import Capability
from agl_core.learning.tool_results import function_of, tool_calls_of
from agl_core.store import Store
from agl_core.types import AlarmName, AttemptKey, Ending, Episode, Rollout
from agl_core.wire import Activity, RunningAttempt
from agl_server.health.rollouts import show_message
from agl_server.health.table import ALARMS, REMEDIES, SHORTEST_STALL, Alarm, Numbers

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

KEPT_FIRST, KEPT = 100, 1000
"""Steps that alarms look at: so many at the start, and the latest."""
ENGINE_SHORTEST, TIMES = 600.0, 3.0
"""Seconds that the engine may always take; a stall takes so many times the longest wait so far."""
_MAX_REPLY = 500
"""Characters of the reply that an alarm shows."""
_MAX_NAMED = 3
"""The most rollouts, or tools, that a sentence names."""
_MAX_STANDSTILLS = 100
_ENGINE_REMEDY = (
    "See the engine's log in the run's folder, and whether its process was stopped, swaps, or waits for a device. "
    "If it stays so, stop the run (Ctrl-C) and resume it."
)
_PROCESS_REMEDY = (
    "See whether it was stopped, the machine was suspended or swaps, or a reward rule or plugin blocks it."
)


@dataclass
class Watch:
    """Looks at each step. An alarm that goes on is raised once.

    It looks at the first steps and the last `kept` ones: a run may have very many.
    """

    settings: Mapping[AlarmName, float | Literal[False]] = field(default_factory=dict)
    policies: Sequence[str] = ("default",)
    steps: list[Numbers] = field(default_factory=list)
    kept: int = KEPT

    @property
    def held(self) -> Numbers:
        """The alarms that hold after the latest step, as metrics."""
        return {key: value for step in self.steps[-1:] for key, value in step.items() if key.startswith("alarm/")}

    def wanted(self, alarms: Iterable[Alarm]) -> list[Alarm]:
        """The alarms among these that the run has not switched off."""
        return [alarm for alarm in alarms if self.settings.get(alarm.name) is not False]

    def look(self, numbers: Numbers, others: Iterable[Alarm] = ()) -> list[Alarm]:
        """The alarms after a step with these numbers that did not hold before it; `others` were raised elsewhere."""
        before = self.held
        self.steps.append(numbers)
        if len(self.steps) > KEPT_FIRST + self.kept:
            del self.steps[KEPT_FIRST : -self.kept]
        alarms = self.wanted([*others, *self._on_numbers()])
        self.steps[-1] = {**numbers, **{f"alarm/{alarm.name}": 1.0 for alarm in alarms}}
        return [alarm for alarm in alarms if f"alarm/{alarm.name}" not in before]

    def _on_numbers(self) -> Iterator[Alarm]:
        """The alarms that hold; those on updates look at each policy, by the steps that updated it."""
        updates: dict[str, list[Numbers]] = {}
        for policy in self.policies if len(self.policies) > 1 else ():
            own = f"update/{policy}/"
            updates[f"policy {policy}: "] = [
                {**step, **{f"update/{key.removeprefix(own)}": step[key] for key in of_policy}}
                for step in self.steps
                if (of_policy := [key for key in step if key.startswith(own)])
            ]
        for name in AlarmName:
            if (signal := ALARMS[name].signal) is not None:
                limit = self.settings.get(name) or signal.limit
                by_policy = updates if updates and signal.of_update else {"": self.steps}
                seen = {policy: signal.check(steps, limit) for policy, steps in by_policy.items()}
                if any(seen.values()):
                    yield Alarm.of(name, "; ".join(f"{policy}{text}" for policy, text in seen.items() if text))


def alarms_of(loaded: LoadedConfig) -> list[AlarmName]:
    """The alarms on rollouts that a run with this configuration may raise; none if it does not look at rewards."""
    if not loaded.is_rewarded:
        return []
    tables = loaded.config.rewards
    names = [AlarmName.NO_REWARD, AlarmName.CONTRADICTED_TOOL_RESULTS]
    if loaded.config.agent is not None:
        names += [AlarmName.NO_RESULT, AlarmName.CACHED_REPLIES]
    if _counts_tool_results(loaded):
        names.append(AlarmName.ASSERTED_TOOL_RESULTS)
    if not any(table.weight and any(mode.trains for mode in table.modes) for table in tables.values()):
        names.append(AlarmName.ASSERTED_REWARDS)
    return names


def settings_of(loaded: LoadedConfig) -> Mapping[AlarmName, float | Literal[False]]:
    """The run's `[alarms]`, which are off by default if they look at something that it does not reward."""
    return ({} if _counts_tool_results(loaded) else {AlarmName.TOOLS_FARMED: False}) | loaded.config.alarms


def _counts_tool_results(loaded: LoadedConfig) -> bool:
    rules = [chosen for name, chosen in loaded.rewards.items() if loaded.config.rewards[name].weight]
    counting = [*rules, *(plan.credit for plan in loaded.policies.values())]
    return any(Capability.TOOL_RESULTS in chosen.component.provides for chosen in counting)


def alarms_on(episodes: Sequence[Episode], names: Iterable[AlarmName]) -> list[Alarm]:
    """The alarms among these that the rollouts raise."""
    signals = ((name, ALARMS[name].in_rollouts) for name in names)
    return [Alarm.of(name, seen) for name, signal in signals if signal is not None and (seen := signal(episodes))]


def common_failure(episodes: Sequence[Episode]) -> Ending | None:
    """The ending of all these rollouts, if it is the same and not `finished`."""
    endings = {episode.ending for episode in episodes}
    return endings.pop() if len(endings) == 1 and Ending.FINISHED not in endings else None


async def alarm_of_failures(store: Store, episodes: Sequence[Episode], *, common: bool = True) -> Alarm | None:
    """How these rollouts failed, with the first error; None if not all failed in one way (`common`), or none did."""
    failed = [episode for episode in episodes if episode.ending is not Ending.FINISHED]
    if not failed or (common and common_failure(episodes) is None):
        return None
    [(ending, count)] = Counter(episode.ending for episode in failed).most_common(1)
    # An agent that fails before any reply is certainly at fault, so that one is shown first.
    first = min((e for e in failed if e.ending is ending), key=lambda episode: bool(episode.transitions))
    errors = [a.error for a in await store.attempts(first.rollout) if a.attempt == first.attempt and a.error]
    details = f"The first, {first.rollout}:\n{errors[0]}" if errors else ""
    seen, remedy = f"{count} of {len(episodes)} rollouts ended as {ending.value}", REMEDIES.get(ending, "")
    if first.transitions:
        seen += ", each after a reply of the model"
        reply = " ".join(show_message(first.transitions[-1].response).split())
        details += f"\nThe model had replied: {reply[:_MAX_REPLY] or 'nothing'}"
    elif first.bypassed:
        remedy = f"{REMEDIES[Ending.NO_CALL]} It called {', '.join(first.bypassed)}."
    elif ending is Ending.CRASHED:
        remedy = f"Fix what the agent raises. If its LLM client reaches no server: {REMEDIES[Ending.NO_CALL]}"
    return Alarm.of(AlarmName.FAILURES, seen, remedy=remedy, details=details)


@dataclass
class StallWatch:
    """Raises the alarm when what is waited for takes too long, and says it at once; StoreError if that is the store.

    It remembers when the machine stood still: the engine left a call unanswered for as long as an alarm takes, or this
    process, which is the gateway too, got no time. Rollouts that failed by that are not at fault.
    """

    setting: float | Literal[False] | None = False
    """The run's own number of seconds; None: as many as follow from the run; False: no alarm."""
    activity: Callable[[], Activity] | None = None
    """Asks the server for whom or what rollouts wait."""
    store: Store | None = None
    say: Callable[[str], None] = logger.warning
    alarms: list[Alarm] = field(default_factory=list, init=False)
    _longest: dict[str, float] = field(default_factory=dict, init=False)
    """Seconds of the longest wait so far: for a rollout (""), and for what the engine does."""
    _standstills: list[tuple[float, float]] = field(default_factory=list, init=False)
    """From and to, in seconds since 1970."""

    def take(self) -> list[Alarm]:
        """The alarms that were raised since this was last asked."""
        alarms, self.alarms = self.alarms, []
        return alarms

    async def watched(self, work: Awaitable[Result], engine_does: str = "") -> Result:
        """The result of a rollout's end, or of something that the engine does; alarms while it takes too long."""
        task, started = asyncio.ensure_future(work), time.monotonic()
        failed_before = self.store and self.store.failure
        least = ENGINE_SHORTEST if engine_does else SHORTEST_STALL
        limit = self.setting or max(least, TIMES * self._longest.get(engine_does, 0.0))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=None if self.setting is False else limit)
                if not task.done():
                    seen, remedy = f"the trainer waits for the engine, {engine_does}", _ENGINE_REMEDY
                    waited = time.monotonic() - started
                    if self.activity is not None and self.store is not None and not engine_does:
                        if self.store.failure not in (None, failed_before):  # Workers wait for the store.
                            raise self.store.failure
                        activity = self.activity()
                        seen, remedy = await who_waits(activity, self.store)
                        unanswered = max((attempt.asking or 0.0 for attempt in activity.attempts), default=0.0)
                        if unanswered >= limit or not activity.serving:
                            self._standstills.append((time.time() - waited, math.inf))
                    self._raise(f"nothing has finished for {waited:.0f} s: {seen}", remedy)
                    limit *= 2
            return task.result()
        finally:
            task.cancel()
            self._longest[engine_does] = max(self._longest.get(engine_does, 0.0), time.monotonic() - started)

    def _raise(self, seen: str, remedy: str) -> None:
        self.alarms.append(Alarm.of(AlarmName.STALL, seen, remedy=remedy))
        self.say(self.alarms[-1].text)

    def slept(self, seconds: float) -> None:
        """This process, which looks around all the time, did nothing for so long: it was stopped, or blocked."""
        if self.setting is not False and seconds >= (self.setting or SHORTEST_STALL):
            self._standstills.append((time.time() - seconds, time.time()))
            self._raise(f"this process got no time for {seconds:.0f} s, and every agent waited for it", _PROCESS_REMEDY)

    async def kept_waiting(self, rollouts: Sequence[Rollout]) -> set[str]:
        """The ids of rollouts that timed out or crashed while the machine stood still."""
        hurt = {r.id: r.counted_attempt for r in rollouts if r.ending in (Ending.TIMED_OUT, Ending.CRASHED)}
        attempts = await self.store.attempts(*hurt) if hurt and self._standstills and self.store is not None else []
        kept = {
            attempt.rollout
            for attempt in attempts
            if attempt.attempt == hurt[attempt.rollout]
            if any(attempt.started <= end and begin <= (attempt.ended or math.inf) for begin, end in self._standstills)
        }
        if kept:
            self.say(
                f"{len(kept)} rollouts that did not finish are dropped: the machine kept them waiting "
                f"({', '.join(sorted(kept)[:_MAX_NAMED])})"
            )
        if any(rollout.ending is Ending.FINISHED for rollout in rollouts):  # The machine goes on.
            now = time.time()
            self._standstills = [(begin, min(end, now)) for begin, end in self._standstills[-_MAX_STANDSTILLS:]]
        return kept


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
        tools = [function_of(tool_call)[0] for choice in choices for tool_call in tool_calls_of(choice.message)]
        for tool in tools or [""]:
            by_tool[tool].append(attempt)
    return by_tool


def _counted(attempts: Sequence[RunningAttempt], noun: str) -> str:
    rollouts = ", ".join(attempt.rollout for attempt in attempts[:_MAX_NAMED])
    more = ", …" if len(attempts) > _MAX_NAMED else ""
    return f"{len(attempts)} {noun}{'s' if len(attempts) > 1 else ''} ({rollouts}{more})"
