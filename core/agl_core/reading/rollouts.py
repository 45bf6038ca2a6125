"""The rollouts of a run: listing them with their rewards, and filtering them, for `agl rollouts` and for pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agl_core.reading.explained import TerminalReward, counted_of, healths_of, is_superseded, reward_weights
from agl_core.reading.words import message_text
from agl_core.store.interface import Store
from agl_core.training.rollouts import by_rollout, counted_attempts
from agl_core.types import Call, Ending, Json, Mode, Reward, Rollout, ToolStatus, Verdict

_PAGE = 200
"""Rollouts that are read together while matches are looked for."""


@dataclass(frozen=True, slots=True)
class RolloutEntry:
    """One rollout of a list."""

    rollout: Rollout
    superseded: bool
    rewards: Sequence[Reward]
    """Those of the attempt that counts."""
    reward: float | None
    """The terminal reward: the weighted sum of those that rules gave; None without one."""


@dataclass(frozen=True, slots=True)
class RolloutList:
    """Rollouts, the newest last."""

    entries: Sequence[RolloutEntry]
    pruned: bool
    """The calls of the oldest step among these were pruned."""


@dataclass(frozen=True, slots=True)
class Query:
    """Which rollouts; None: any. Calls, tools and training are those of the attempt that counts."""

    step: int | None = None
    mode: Mode | None = None
    ending: Ending | None = None
    agent: str | None = None
    """One that made a call."""
    policy: str | None = None
    """One that answered a call."""
    tool: str | None = None
    """One that was called."""
    status: ToolStatus | None = None
    """How a tool ended: `tool`, if that is given."""
    dropped: str | None = None
    """A reason for which a transition was not trained on."""
    low: float | None = None
    """The least terminal reward."""
    high: float | None = None
    """The highest terminal reward; it is included."""
    text: str | None = None
    """Somewhere in the task's input, a message, a reply, or the result; upper and lower case are alike."""
    split: str | None = None
    """The task's."""
    verdict: Verdict | None = None
    """On the rollout's health."""

    def takes(self, entry: RolloutEntry) -> bool:
        """True if a rollout matches as far as its own record says; step and mode are for the store to select by."""
        rollout, reward = entry.rollout, entry.reward
        return (
            self.split in (None, rollout.task.split)
            and self.ending in (None, rollout.ending)
            and (self.low is None or (reward is not None and reward >= self.low))
            and (self.high is None or (reward is not None and reward <= self.high))
        )


async def entries_of(store: Store, rollouts: Sequence[Rollout]) -> list[RolloutEntry]:
    """These rollouts with their rewards."""
    rewards, runs = by_rollout(await store.rewards(counted_attempts(rollouts))), await store.runs()
    weights = {(run.id, run.restart): reward_weights(run) for run in runs}

    def entry(rollout: Rollout) -> RolloutEntry:
        given = rewards.get(rollout.id, [])
        value = TerminalReward.of(given, weights.get((rollout.run, rollout.restart), {})).value
        return RolloutEntry(rollout, is_superseded(rollout, runs), given, value)

    return [entry(rollout) for rollout in rollouts]


async def matching(store: Store, query: Query, entries: Sequence[RolloutEntry]) -> set[str]:
    """The ids of those that match, whatever their step and mode. Only records that the query is about are read."""
    rollouts = [entry.rollout for entry in entries if query.takes(entry)]
    keys = counted_attempts(rollouts)
    asks_for_calls = query.agent is not None or query.policy is not None or bool(query.text)
    asks_for_tools = query.tool is not None or query.status is not None
    calls = by_rollout(await store.calls(keys)) if asks_for_calls else {}
    tools = by_rollout(await store.tool_results(keys)) if asks_for_tools else {}
    records = by_rollout(await store.training_records(keys)) if query.dropped is not None else {}
    healths = await healths_of(store, rollouts) if query.verdict is not None else {}
    results = {r.id: a.result for r, a in await counted_of(store, rollouts)} if query.text else {}

    def matches(rollout: Rollout) -> bool:
        id = rollout.id
        own_calls = calls.get(id, ())
        return (
            (query.agent is None or any(call.agent == query.agent for call in own_calls))
            and (query.policy is None or any(call.policy == query.policy for call in own_calls))
            and (
                not asks_for_tools
                or any(query.tool in (None, t.tool) and query.status in (None, t.status) for t in tools.get(id, ()))
            )
            and (query.dropped is None or any(query.dropped == record.dropped for record in records.get(id, ())))
            and (query.verdict is None or (id in healths and healths[id].verdict is query.verdict))
            and (not query.text or _contains(query.text.lower(), rollout, results.get(id), own_calls))
        )

    return {rollout.id for rollout in rollouts if matches(rollout)}


async def list_rollouts(store: Store, query: Query, limit: int) -> RolloutList:
    """The newest rollouts that match, the newest last."""
    everything = Query(step=query.step, mode=query.mode)
    newest = await store.rollouts(step=query.step, mode=query.mode, newest=limit if query == everything else None)
    entries: list[RolloutEntry] = []
    for end in range(len(newest), 0, -_PAGE):
        page = await entries_of(store, newest[max(0, end - _PAGE) : end])
        ids = await matching(store, query, page)
        entries[:0] = [entry for entry in page if entry.rollout.id in ids]
        if len(entries) >= limit:
            break
    entries = entries[-limit:]
    counted = [entry.rollout for entry in entries if entry.rollout.counted_attempt is not None]
    oldest = sorted(counted, key=lambda rollout: rollout.step)[:1]
    return RolloutList(entries, any(call.pruned for call in await store.calls(counted_attempts(oldest))))


def _contains(text: str, rollout: Rollout, result: Json, calls: Sequence[Call]) -> bool:
    messages: list[Mapping[str, Json]] = [
        m for call in calls for m in call.request.get("messages") or () if isinstance(m, dict)
    ]
    messages += [choice.message for call in calls for choice in call.choices]
    return any(text in part.lower() for part in (str(rollout.task.input), *map(message_text, messages), str(result)))
