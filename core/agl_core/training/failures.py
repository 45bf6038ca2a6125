"""The alarms on the rollouts of a step, when training stops because of them, and the alarm when nothing goes on."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from agl_core.config.load import LoadedConfig
from agl_core.errors import TrainingError
from agl_core.kinds import Capability
from agl_core.learning.rewards import AGENT_SOURCE, was_rewarded
from agl_core.learning.tool_results import CONTRADICTED, has_failed, tool_calls_of
from agl_core.learning.transitions import message_text
from agl_core.store.interface import Store
from agl_core.training.alarms import Alarm
from agl_core.training.metrics import LOSS, counts, of_update
from agl_core.types import AttemptKey, DropReason, Ending, Episode, Rollout, Source, ToolResult
from agl_core.wire import Activity, RunningAttempt

if TYPE_CHECKING:
    from agl_core.training.rollouts import Drawn

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Check: TypeAlias = Callable[[Sequence[Episode]], str | None]
"""An alarm on the new rollouts of a step; `alarms` says what an alarm is."""

REMEDIES: Mapping[str, str] = {
    Ending.CRASHED: "Fix what the agent raises. If a reply of the model makes it raise (it calls a tool that does not "
    "exist, say), the agent is not broken: let it catch that error and return.",
    Ending.TIMED_OUT: "Raise workers.timeout, or have the agent stop earlier.",
    Ending.CONTEXT_OVERFLOW: "Shorten what the agent asks, or train a model with a longer context.",
    Ending.NO_CALL: "Send the calls of the agent's LLM client through agl: let it read OPENAI_BASE_URL or "
    "ANTHROPIC_BASE_URL.",
    Ending.LOST: "See what the workers say, and their memory (workers.memory_mib).",
    DropReason.NO_TOKEN_IDS: "Serve the policy with agl's own engine, or with one that returns token ids; to train on "
    "recorded texts, set without_logprobs = true in [tasks.train].",
    DropReason.NO_LOGPROBS: "Serve the policy with agl's own engine, or with one that returns log-probabilities; to "
    "train on recorded replies without them, set without_logprobs = true in [tasks.train].",
    DropReason.INCOMPLETE_IDS: "Upgrade the model server, or serve the policy with agl's own engine.",
    DropReason.UNTRAINED_AGENT: "Name agents in train.agents that make calls.",
    DropReason.ABORTED: "See the model server's log: it breaks off what it is asked.",
    DropReason.UNDELIVERED: "Let the agent wait for its replies, or give its client a longer timeout.",
    DropReason.PLUGIN: "See which `episode_built` hook takes them out.",
    DropReason.NON_FINITE: "Look for NaN in the algorithm's advantages and loss, and in recorded log-probabilities.",
    DropReason.TRUNCATED: "Raise sampling.max_tokens, or set train.truncated to 'keep'.",
    DropReason.CONSTRAINED: "Let the agent ask in its prompt for the form of replies, or train by the torch engine.",
    DropReason.TOO_LONG: "Train a model with a longer context, or have the agent ask less.",
}
"""Advice for each reason that keeps rollouts from being trained on."""
_PASSING = frozenset({DropReason.NO_ADVANTAGE, DropReason.NO_CONTRAST, DropReason.STALE, DropReason.STALLED})
"""Reasons that training itself causes and removes: rewards that are equal, for example, may differ later."""
SHORTEST, ENGINE_SHORTEST, TIMES = 60.0, 600.0, 3.0
"""Seconds without an end that are always allowed to rollouts and to the engine; times the longest wait so far."""
_MAX_REPLY = 500
"""Characters of the reply that an alarm shows."""
_MAX_NAMED = 3
"""The most rollouts, or tools, that a sentence names."""
_ENGINE_REMEDY = (
    "See the engine's log in the run's folder, and whether its process was stopped, swaps, or waits for a device. "
    "If it stays so, stop the run (Ctrl-C) and resume it."
)
_PROCESS_REMEDY = (
    "See whether it was stopped, the machine was suspended or swaps, or a reward rule or plugin blocks it."
)
_MAX_STANDSTILLS = 100


def no_reward(episodes: Sequence[Episode]) -> str | None:
    """No rule had anything to say of any rollout of a step, and no agent reported a reward. All rollouts count as 0,
    and nothing can be learned.

    Name a rule in [rewards], or have the agent call agl_core.reward(value); what it returns is its result.
    """
    scored = [episode for episode in episodes if episode.dropped is None]
    if not scored or any(map(was_rewarded, scored)):
        return None
    return f"no rule in [rewards] had anything to say of {len(scored)} rollouts, and no agent reported a reward"


def no_result(episodes: Sequence[Episode]) -> str | None:
    """The result was null in all rollouts of a step, and their rewards are equal. A rule that compares the result with
    the task's answer gives all of them the same.

    Let the agent's function return its answer, unless its rewards rest on other things.
    """
    finished = [episode for episode in episodes if episode.ending is Ending.FINISHED]
    reported = any(reward.source == AGENT_SOURCE for episode in finished for reward in episode.rewards)
    if not finished or reported or any((e.result, e.terminal) != (None, finished[0].terminal) for e in finished):
        return None
    return f"the result was null in all {len(finished)} rollouts"


def cached_replies(episodes: Sequence[Episode]) -> str | None:
    """Rollouts made no LLM call where others of their group made some, or went on from a reply that another one got.
    A cache in the agent's client answers them: they are copies, and teach nothing.

    Switch the cache off (LangChain's set_llm_cache, DSPy's and LiteLLM's cache); if there is none, see what the
    attempts say (agl show ROLLOUT).
    """
    groups, cached = defaultdict[str, list[Episode]](list), list[str]()
    for episode in episodes:
        groups[episode.group].append(episode)
    for group in groups.values():
        got = {e.rollout: {call["id"] for t in e.transitions for call in tool_calls_of(t.response)} for e in group}
        for episode in group:
            others = set().union(*(ids for rollout, ids in got.items() if rollout != episode.rollout))
            last = episode.transitions[-1].messages if episode.transitions else ()
            copied = {call["id"] for message in last for call in tool_calls_of(message)} - got[episode.rollout]
            is_silent = episode.ending is Ending.NO_CALL and any(other.transitions for other in group)
            if is_silent or copied & others:
                cached.append(episode.rollout)
    return f"{len(cached)} of {len(episodes)} rollouts seem to have got replies from a cache" if cached else None


async def failures(store: Store, episodes: Sequence[Episode]) -> Alarm | None:
    """All rollouts of a step, or of an evaluation, failed in one way; or some of the first evaluation. Rollouts that
    fail teach little or nothing.

    Fix what the first error says.
    """
    failed = [episode for episode in episodes if episode.ending is not Ending.FINISHED]
    if not failed:
        return None
    [(ending, count)] = Counter(episode.ending for episode in failed).most_common(1)
    # An agent that fails before any reply is certainly at fault, so that one is shown first.
    first = min((e for e in failed if e.ending is ending), key=lambda episode: bool(episode.transitions))
    errors = [a.error for a in await store.attempts(first.rollout) if a.attempt == first.attempt and a.error]
    details = f"The first, {first.rollout}:\n{errors[0]}" if errors else ""
    seen, remedy = f"{count} of {len(episodes)} rollouts ended as {ending.value}", REMEDIES.get(ending, "")
    if first.transitions:
        seen += ", each after a reply of the model"
        reply = " ".join(message_text(first.transitions[-1].response).split())
        details += f"\nThe model had replied: {reply[:_MAX_REPLY] or 'nothing'}"
    elif first.bypassed:
        remedy = f"{REMEDIES[Ending.NO_CALL]} It called {', '.join(first.bypassed)}."
    elif ending is Ending.CRASHED:
        remedy = f"Fix what the agent raises. If its LLM client reaches no server: {REMEDIES[Ending.NO_CALL]}"
    return Alarm.of(failures, seen, remedy=remedy, details=details)


def asserted_tool_results(episodes: Sequence[Episode]) -> str | None:
    """Tool results count in reward or credit, and only the agent's side says what some were. Whatever the agent starts
    can say the same, and so earn rewards that it does not deserve.

    See docs/security.md.
    """
    tool_results = _tool_results(episodes)
    asserted = Counter(
        result.source.value for result in tool_results if result.source is not Source.CONVERSATION
    ).most_common()
    if not asserted:
        return None
    sources = ", ".join(f"{source} {count}" for source, count in asserted)
    return (
        f"tool results count in the reward, and only the agent's side says what some of the {len(tool_results)} of "
        f"this step were ({sources})"
    )


def contradicted_tool_results(episodes: Sequence[Episode]) -> str | None:
    """Tool results of a step were reported as a success, and the model was shown a failure, which counts. Something
    that the agent starts may be forging reports, or a tool's report is wrong.

    Read these rollouts (agl show ROLLOUT) and see docs/security.md.
    """
    tool_results = _tool_results(episodes)
    denied = [result for result in tool_results if result.status_rule == CONTRADICTED and has_failed(result)]
    if not denied:
        return None
    return (
        f"{len(denied)} of {len(tool_results)} tool results were reported as a success, and the model was shown a "
        f"failure, which counts (the first: {denied[0].tool} in {denied[0].rollout})"
    )


def asserted_rewards(episodes: Sequence[Episode]) -> str | None:
    """No rule in [rewards] has a weight, and the reward is what the agent reports. Whatever the agent starts can say
    the same, and so earn rewards that it does not deserve.

    See docs/security.md.
    """
    if all(reward.source != AGENT_SOURCE for episode in episodes for reward in episode.rewards):
        return None
    return "the reward is what the agent reports: no rule in [rewards] has a weight"


def checks_in(loaded: LoadedConfig) -> list[Check]:
    """The alarms on rollouts that a run with this configuration may raise; none if it does not look at rewards.

    Those on what the agent's side alone says: on tool results, if a rule computes rewards or credit from them; on
    rewards, if no reward rule has a weight.
    """
    if not loaded.is_rewarded:
        return []
    tables = loaded.config.rewards
    rules = [chosen for name, chosen in loaded.rewards.items() if tables[name].weight]
    counting = [*rules, *(plan.credit for plan in loaded.policies.values())]
    checks: list[Check] = [no_reward, contradicted_tool_results]
    if loaded.config.agent is not None:
        checks += [no_result, cached_replies]
    if any(Capability.TOOL_RESULTS in chosen.component.provides for chosen in counting):
        checks.append(asserted_tool_results)
    if not any(table.weight and any(mode.trains for mode in table.modes) for table in tables.values()):
        checks.append(asserted_rewards)
    return checks


async def rollout_alarms(checks: Sequence[Check], drawn: Drawn, store: Store) -> list[Alarm]:
    """The alarms of these checks on the rollouts of a step, and that on their failures."""
    alarms = [Alarm.of(check, seen) for check in checks if (seen := check(drawn.new)) is not None]
    if common_failure(drawn.new) and (failure := await failures(store, drawn.new)):
        alarms.append(failure)
    return alarms


def _tool_results(episodes: Sequence[Episode]) -> list[ToolResult]:
    return [result for episode in episodes for t in episode.transitions for result in t.tool_results]


def common_failure(episodes: Sequence[Episode]) -> Ending | None:
    """The ending of all these rollouts, if it is the same and not `finished`."""
    endings = {episode.ending for episode in episodes}
    return endings.pop() if len(endings) == 1 and Ending.FINISHED not in endings else None


def why_nothing(numbers: Mapping[str, float]) -> Mapping[str, int]:
    """The reasons for which a step with these numbers had nothing to train on, by how often.

    Empty if it had data, or if rollouts finished and some were dropped for a passing reason. `group_too_small` does not
    count: it follows from others. A loss that is not a number moves no weight, whatever else was dropped.
    """
    if any(map(math.isnan, of_update(LOSS, numbers))):
        return {DropReason.NON_FINITE: 1}
    if numbers["transitions/kept"]:
        return {}
    endings = counts([numbers], "ending/")
    if endings and Ending.FINISHED not in endings:
        return endings
    dropped = counts([numbers], "dropped/") + counts([numbers], "episodes_dropped/")
    ignored = {DropReason.GROUP_TOO_SMALL, *(_PASSING if DropReason.NON_FINITE in dropped else ())}
    reasons = {reason: count for reason, count in dropped.items() if reason not in ignored}
    return {} if reasons.keys() & _PASSING else reasons


def check_patience(step: int, steps: Sequence[Mapping[str, float]], patience: int) -> None:
    """TrainingError if the last `patience` steps had nothing to train on, whatever the reason of each; 0: never."""
    reasons = [why_nothing(numbers) for numbers in steps[-patience:]]
    if not patience or len(reasons) < patience or not all(reasons):
        return
    most = sum(map(Counter, reasons), Counter[str]()).most_common()
    which = f"step {step}" if patience == 1 else f"steps {step - patience + 1} to {step}"
    raise TrainingError(
        f"There was nothing to train on in {which}: {', '.join(f'{count} {reason}' for reason, count in most)}. "
        f"{REMEDIES.get(most[0][0], '')} See docs/bad-input.md. The run can be "
        f"resumed; train.patience = N lets N such steps pass, 0 any number."
    )


def check_serving(step: int, updates: Mapping[str, Mapping[str, float]], limit: float) -> None:
    """TrainingError if a policy's server is not what is trained: `updates` are the metrics of a step by policy."""
    for policy, metrics in updates.items():
        gap = metrics.get("prob_gap_mean", 0.0)
        if gap <= limit:
            continue
        sampled, trained = metrics["prob_sampled_mean"], metrics["prob_trained_mean"]
        raise TrainingError(
            f"Serving and training disagree in step {step}. Tokens that the current weights of '{policy}' sampled have "
            f"a mean probability of {sampled:.3g} where they were sampled, and of {trained:.3g} in training. They "
            f"differ by {gap:.3g} on average (train.serving_gap is {limit:g}): probably the server has other weights "
            f"than the trainer, or one of them changes the logits. When the cause is fixed, go on from the last "
            f"checkpoint (agl train --resume)."
        )


def stall(seconds: float, who_waits: str) -> str:
    """Nothing finished for three times the longest wait for a rollout so far, at least 60 seconds; or for as many
    seconds as you set. Training waits, and nothing is learned meanwhile.

    It depends on who waits for whom: ask agl doctor RUN.
    """
    return f"nothing has finished for {seconds:.0f} s: {who_waits}"


@dataclass
class StallWatch:
    """Raises the alarm when what is waited for takes too long, and says it at once; StoreError if that is the store.

    It knows when the machine stood still: the engine left a call unanswered for as long as an alarm takes, or this
    process, which is the gateway too, got no time. What rollouts lost by that is no fault of theirs.
    """

    setting: float | Literal[False] | None = False
    """The run's own number of seconds; None: as many as follow from the run; False: no alarm."""
    activity: Callable[[], Activity] | None = None
    """Asks the server for whom or what rollouts wait."""
    store: Store | None = None
    """Has the records of these rollouts."""
    say: Callable[[str], None] = logger.warning
    _alarms: list[Alarm] = field(default_factory=list, init=False)
    _longest: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float), init=False)
    """Seconds of the longest wait so far: for a rollout (""), and for what the engine does."""
    _standstills: list[tuple[float, float]] = field(default_factory=list, init=False)
    """From and to, in seconds since 1970."""

    def take(self) -> list[Alarm]:
        """The alarms that were raised since this was last asked."""
        alarms, self._alarms = self._alarms, []
        return alarms

    async def watched(self, work: Awaitable[Result], engine_does: str = "") -> Result:
        """The result of a rollout's end, or of something that the engine does; alarms while it takes too long."""
        task, started = asyncio.ensure_future(work), time.monotonic()
        failed_before = self.store and self.store.failure
        least = ENGINE_SHORTEST if engine_does else SHORTEST
        limit = self.setting or max(least, TIMES * self._longest[engine_does])
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
                    self._raise(stall(waited, seen), remedy)
                    limit *= 2
            return task.result()
        finally:
            task.cancel()
            waited = time.monotonic() - started
            self._longest[engine_does] = max(self._longest[engine_does], waited)

    def _raise(self, seen: str, remedy: str) -> None:
        self._alarms.append(Alarm.of(stall, seen, remedy=remedy))
        self.say(self._alarms[-1].text)

    def slept(self, seconds: float) -> None:
        """This process, which looks around all the time, did nothing for so long: it was stopped, or blocked."""
        if self.setting is not False and seconds >= (self.setting or SHORTEST):
            self._standstills.append((time.time() - seconds, time.time()))
            self._raise(f"this process got no time for {seconds:.0f} s, and every agent waited for it", _PROCESS_REMEDY)

    async def kept_waiting(self, rollouts: Sequence[Rollout]) -> set[str]:
        """Those of these rollouts that timed out or crashed while the machine stood still."""
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
        functions = [tool_call.get("function") for choice in choices for tool_call in tool_calls_of(choice.message)]
        tools = [str(function["name"]) for function in functions if isinstance(function, dict) and "name" in function]
        for tool in tools or [""]:
            by_tool[tool].append(attempt)
    return by_tool


def _counted(attempts: Sequence[RunningAttempt], noun: str) -> str:
    rollouts = ", ".join(attempt.rollout for attempt in attempts[:_MAX_NAMED])
    more = ", …" if len(attempts) > _MAX_NAMED else ""
    return f"{len(attempts)} {noun}{'s' if len(attempts) > 1 else ''} ({rollouts}{more})"
