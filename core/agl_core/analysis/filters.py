"""Which rollouts someone asks for, by what was recorded of them: for `agl rollouts` and for the pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agl_core.analysis.rollouts import RolloutEntry, RolloutList, counted_of, entries_of, healths_of
from agl_core.analysis.text.words import message_text
from agl_core.store.interface import Store
from agl_core.training.rollouts import by_rollout, counted_attempts
from agl_core.types import Call, Ending, Json, Mode, Rollout, ToolResult, ToolStatus, TrainingRecord, Verdict

_AT_ONCE = 200
"""Rollouts that are read together while matches are looked for."""


@dataclass(frozen=True, slots=True)
class Query:
    """Which rollouts; None: any. What is asked of calls, tools and training is of the attempt that counts."""

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
    """What a tool came to: of `tool`, if that is given."""
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

    @property
    def of_calls(self) -> bool:
        return any(value is not None for value in (self.agent, self.policy)) or bool(self.text)

    @property
    def of_tools(self) -> bool:
        return self.tool is not None or self.status is not None


async def matching(
    store: Store, query: Query, entries: Sequence[RolloutEntry], records: Mapping[str, Sequence[TrainingRecord]]
) -> set[str]:
    """The ids of those that match; `records` are their training records by rollout, if the query is about them.

    Step and mode are for the store to select by. Only what the query is about is read.
    """
    left = [entry for entry in entries if matches_itself(query, entry)]
    keys = counted_attempts([entry.rollout for entry in left])
    calls = by_rollout(await store.calls(keys)) if query.of_calls else {}
    tools = by_rollout(await store.tool_results(keys)) if query.of_tools else {}
    healths = await healths_of(store, [entry.rollout for entry in left]) if query.verdict is not None else {}
    counted = await counted_of(store, [entry.rollout for entry in left]) if query.text else ()
    results = {rollout.id: attempt.result for rollout, attempt in counted}
    found = set()
    for entry in left:
        id = entry.rollout.id
        if query.verdict is not None and (id not in healths or healths[id].verdict is not query.verdict):
            continue
        if _matches_inside(query, calls.get(id, ()), tools.get(id, ()), records.get(id, ())) and (
            not query.text or _says(query.text.lower(), entry.rollout, results.get(id), calls.get(id, ()))
        ):
            found.add(id)
    return found


async def list_rollouts(store: Store, query: Query, limit: int) -> RolloutList:
    """The newest rollouts that match, the newest last."""
    everything = Query(step=query.step, mode=query.mode)
    newest = await store.rollouts(step=query.step, mode=query.mode, newest=limit if query == everything else None)
    found: list[RolloutEntry] = []
    for end in range(len(newest), 0, -_AT_ONCE):
        entries = await entries_of(store, newest[max(0, end - _AT_ONCE) : end])
        keys = counted_attempts([entry.rollout for entry in entries])
        records = by_rollout(await store.training_records(keys)) if query.dropped else {}
        ids = await matching(store, query, entries, records)
        found[:0] = [entry for entry in entries if entry.rollout.id in ids]
        if len(found) >= limit:
            break
    found = found[-limit:]
    oldest = sorted((e.rollout for e in found if e.rollout.counted_attempt is not None), key=lambda each: each.step)[:1]
    return RolloutList(found, any(call.pruned for call in await store.calls(counted_attempts(oldest))))


def matches_itself(query: Query, entry: RolloutEntry) -> bool:
    """Whether a rollout matches, as far as that takes no call, tool or training record."""
    rollout, reward = entry.rollout, entry.reward
    if query.split is not None and rollout.task.split != query.split:
        return False
    if query.ending is not None and rollout.ending is not query.ending:
        return False
    if query.low is not None and (reward is None or reward < query.low):
        return False
    return query.high is None or (reward is not None and reward <= query.high)


def _matches_inside(
    query: Query, calls: Sequence[Call], tools: Sequence[ToolResult], records: Sequence[TrainingRecord]
) -> bool:
    if query.agent is not None and query.agent not in {call.agent for call in calls}:
        return False
    if query.policy is not None and query.policy not in {call.policy for call in calls}:
        return False
    if query.of_tools and not any(query.tool in (None, t.tool) and query.status in (None, t.status) for t in tools):
        return False
    return query.dropped is None or query.dropped in {record.dropped for record in records}


def _says(text: str, rollout: Rollout, result: Json, calls: Sequence[Call]) -> bool:
    messages = [
        message for call in calls for message in call.request.get("messages") or () if isinstance(message, dict)
    ]
    said = [*messages, *(choice.message for call in calls for choice in call.choices)]
    return any(text in each.lower() for each in (str(rollout.task.input), *map(message_text, said), str(result)))
