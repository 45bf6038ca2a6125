"""The rollouts of a run: which ones match, in lists, pages and groups."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from agl_core.store import Store
from agl_core.types import Ending, Json, Mode, RecordedRollout, Rollout, RolloutState, ToolStatus, Verdict
from agl_server.health.rollouts import show_message
from agl_server.reading.explained import RolloutEntry, RolloutReport, entries_of, is_superseded, reports_of
from agl_server.reading.runs import PREFERENCES, open_store, read_settings
from agl_server.training.rollouts import read_attempts

_PAGE = 200
"""Rollouts that are read together while matches are looked for."""
_WORD = re.compile("[A-Za-z0-9]+")


@dataclass(frozen=True, slots=True)
class Query:
    """Which rollouts; None: any. Calls, tools and training are those of the attempt that counts.

    Commands have an option for each field, with this help.
    """

    step: Annotated[int | None, "Only of this step."] = None
    mode: Annotated[Mode | None, "Only of this mode."] = None
    split: Annotated[str | None, "Only of tasks of this split."] = None
    ending: Annotated[Ending | None, "Only those that ended like this."] = None
    agent: Annotated[str | None, "Only those in which this agent made a call."] = None
    policy: Annotated[str | None, "Only those in which this policy answered a call."] = None
    tool: Annotated[str | None, "Only those in which this tool was called."] = None
    tool_status: Annotated[ToolStatus | None, "Only those in which a tool (of --tool) came to this."] = None
    dropped: Annotated[str | None, "Only those with a transition dropped for this reason."] = None
    min_reward: Annotated[float | None, "Only with at least this terminal reward."] = None
    max_reward: Annotated[float | None, "Only with at most this terminal reward."] = None
    text: Annotated[str | None, "Only those with this text in task, call or result."] = None
    verdict: Annotated[Verdict | None, "Only those with this verdict (docs/health.md)."] = None

    @property
    def words(self) -> list[str]:
        """The words of the text that are alike in what is stored and in what `takes_calls` looks at."""
        return [word for word in _WORD.findall(self.text or "") if word.lower() != "none"]

    @property
    def reads_calls(self) -> bool:
        """True if calls and tool results have to be read to know what matches."""
        return any((self.agent, self.policy, self.tool, self.tool_status, self.text, self.verdict))

    def takes(self, entry: RolloutEntry) -> bool:
        """True if a rollout matches but for its calls, and for step and mode, which the store selects by."""
        rollout, reward = entry.rollout, entry.reward
        return (
            self.split in (None, rollout.task.split)
            and self.ending in (None, rollout.ending)
            and (self.min_reward is None or (reward is not None and reward >= self.min_reward))
            and (self.max_reward is None or (reward is not None and reward <= self.max_reward))
            and (self.dropped is None or any(self.dropped == record.dropped for record in entry.training_records))
        )

    def takes_calls(self, report: RolloutReport) -> bool:
        """True if a rollout matches as far as its calls say."""
        attempt, health = report.counted, report.health
        transitions = () if attempt is None else attempt.episode.transitions
        results = [result for t in transitions for result in t.tool_results]
        results += [] if attempt is None else attempt.episode.unjoined
        return (
            (self.agent is None or any(t.agent == self.agent for t in transitions))
            and (self.policy is None or any(t.policy == self.policy for t in transitions))
            and (
                (self.tool is None and self.tool_status is None)
                or any(self.tool in (None, r.tool) and self.tool_status in (None, r.status) for r in results)
            )
            and (self.verdict is None or (health is not None and health.verdict is self.verdict))
            and (not self.text or any(self.text.lower() in part.lower() for part in _texts(report)))
        )


def _texts(report: RolloutReport) -> list[str]:
    """The texts of a rollout that a search looks at."""
    messages: list[Mapping[str, Json]] = []
    for transition in () if report.counted is None else report.counted.episode.transitions:
        messages += [*transition.messages, transition.response]
    attempt = report.entry.attempt
    result = None if attempt is None else attempt.result
    return [str(report.entry.rollout.task.input), *map(show_message, messages), str(result)]


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """Some rollouts of a run, in whole groups."""

    entries: Sequence[RolloutEntry]
    matching: set[str]
    """The ids of those that match."""
    older: str | None
    """The rollout that older pages are before; None if there are none."""
    newer: str | None
    """The rollout that newer pages are after; None if there are none."""


async def read_page(
    folder: Path, query: Query, size: int, before: str | None = None, after: str | None = None
) -> RolloutPage:
    """About `size` rollouts of the query's step and mode: the newest, or those before or after another rollout."""
    most = size + 1
    async with open_store(folder) as store:
        rollouts = await store.rollouts(
            step=query.step, mode=query.mode, before=before, after=after, limit=most, newest=None if after else most
        )
        goes_on = len(rollouts) > size
        if goes_on:
            cut = rollouts[0 if after is None else -1].group
            rollouts = [rollout for rollout in rollouts if rollout.group != cut] or rollouts
        entries = await entries_of(store, rollouts)
        matches = await matching(store, query, entries)
    return RolloutPage(
        entries,
        {entry.rollout.id for entry in matches},
        older=rollouts[0].id if rollouts and (goes_on or after is not None) else None,
        newer=rollouts[-1].id if rollouts and (before is not None or (goes_on and after is not None)) else None,
    )


async def list_rollouts(folder: Path, query: Query, limit: int) -> list[RolloutReport]:
    """The newest rollouts that match, the newest last."""
    selects_all = query == Query(step=query.step, mode=query.mode)
    async with open_store(folder) as store:
        newest = await store.rollouts(
            step=query.step, mode=query.mode, words=query.words, newest=limit if selects_all else None
        )
        matches: list[Rollout] = []
        for end in range(len(newest), 0, -_PAGE):
            page = await entries_of(store, newest[max(0, end - _PAGE) : end])
            matches[:0] = [entry.rollout for entry in await matching(store, query, page)]
            if len(matches) >= limit:
                break
        return await reports_of(store, matches[-limit:])


async def read_entries(folder: Path, query: Query) -> list[RolloutEntry]:
    """The rollouts that match, the newest last, without their calls."""
    async with open_store(folder) as store:
        entries = await entries_of(store, await store.rollouts(step=query.step, mode=query.mode))
        return await matching(store, query, entries)


async def matching(store: Store, query: Query, entries: Sequence[RolloutEntry]) -> list[RolloutEntry]:
    """The matching entries, whatever their step and mode. Calls are only read if the query is about them."""
    entries = [entry for entry in entries if query.takes(entry)]
    if not query.reads_calls:
        return entries
    reports = await reports_of(store, [entry.rollout for entry in entries])
    return [report.entry for report in reports if query.takes_calls(report)]


def groups_of(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The rollouts that are compared with each other, all together, in the order in which they were recorded."""
    groups: dict[tuple[object, ...], list[Rollout]] = {}
    for r in rollouts:
        groups.setdefault((r.run, r.restart, r.step, r.mode, r.task.split, r.group), []).append(r)
    return list(groups.values())


class RecordedRun:
    """The rollouts of a run that count: those that are done, and that no restart superseded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.has_preferences = bool(read_settings(folder).get("capture", {}).get(PREFERENCES))
        with ThreadPoolExecutor(1) as thread:  # In this thread an event loop may be running.
            self.rollouts = thread.submit(asyncio.run, self._done()).result()

    async def _done(self) -> list[Rollout]:
        async with open_store(self._folder) as store:
            runs, done = await store.runs(), await store.rollouts(state=RolloutState.DONE)
        return [r for r in done if r.counted_attempt is not None and not is_superseded(r, runs)]

    async def read(self, rollouts: Sequence[Rollout]) -> list[RecordedRollout]:
        async with open_store(self._folder) as store:
            entries = await entries_of(store, rollouts)
            attempts = [entry.attempt for entry in entries if entry.attempt is not None]
            records = await read_attempts(store, rollouts, attempts)
        pairs = zip(records.values(), entries, strict=True)
        return [replace(recorded, terminal=entry.reward) for recorded, entry in pairs]
