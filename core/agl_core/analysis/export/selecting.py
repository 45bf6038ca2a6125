"""Which recorded rollouts leave a run: read a page at a time, so that a run of any size takes the same memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from agl_core.analysis.filters import Query, matches_itself
from agl_core.analysis.rollouts import AttemptReport, RolloutEntry, attempt_reports, counted_of, entries_of
from agl_core.store.interface import Store
from agl_core.types import Mode, Rollout, RolloutState, Transition, Verdict

_PAGE = 32
"""Rollouts that are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rollouts, and which of their transitions; None: any."""

    steps: tuple[int, int] | None = None
    """The first and the last step, both included."""
    mode: Mode | None = None
    split: str | None = None
    low: float | None = None
    """The least terminal reward."""
    high: float | None = None
    """The highest terminal reward; it is included."""
    agent: str | None = None
    """One that made a call. Of a transition: the one that made its call."""
    verdict: Verdict | None = None
    """Of its health."""
    held_out: bool = True
    """Whether evaluations are selected; if not, they are only where nothing else was recorded."""

    def takes(self, report: AttemptReport) -> bool:
        """Whether a rollout with the right step, mode, split and reward is selected."""
        agents = {transition.agent for transition in report.episode.transitions}
        return self.agent in (None, *agents) and self.verdict in (None, report.health.verdict)

    def has(self, transition: Transition) -> bool:
        """Whether a transition of a selected rollout is selected."""
        return self.agent is None or transition.agent == self.agent


@dataclass(slots=True)
class LeftOut:
    """How many rollouts are not exported, by reason."""

    unfinished: int = 0
    """They are not done, or have no attempt that counts."""
    superseded: int = 0
    """A later restart of the run resumed from before their step."""
    unwanted: int = 0
    """The filters do not ask for them."""
    held_out: int = 0
    """They are evaluations, which are not to be trained on."""


@dataclass(frozen=True, slots=True)
class Exported:
    """One rollout that leaves the run."""

    entry: RolloutEntry
    report: AttemptReport
    """Of the attempt that counts."""

    @property
    def rollout(self) -> Rollout:
        return self.entry.rollout


@dataclass(slots=True)
class Selected:
    """The selected rollouts of a store; what is left out is counted as they are read."""

    store: Store
    selection: Selection
    left_out: LeftOut = field(default_factory=LeftOut)
    _others: bool | None = field(default=None, init=False)

    async def pages(self) -> AsyncIterator[list[Exported]]:
        """All of them, some at a time, in the order in which they were made."""
        after: str | None = None
        first, last = self.selection.steps or (None, None)
        one = first if first == last else None
        while found := await self.store.rollouts(step=one, mode=self.selection.mode, after=after, limit=_PAGE):
            after = found[-1].id
            if first is not None and last is not None:
                found = [rollout for rollout in found if first <= rollout.step <= last]
            yield await self.of(found, self.left_out)

    async def of(self, rollouts: Sequence[Rollout], left_out: LeftOut) -> list[Exported]:
        """Those among these rollouts that are selected."""
        done = [r for r in rollouts if r.state is RolloutState.DONE and r.counted_attempt is not None]
        left_out.unfinished += len(rollouts) - len(done)
        entries = []
        asked = self.selection
        leaves_evaluations = not asked.held_out and await self._has_others()
        query = Query(split=asked.split, low=asked.low, high=asked.high)
        for entry in await entries_of(self.store, done):
            if entry.superseded:
                left_out.superseded += 1
            elif leaves_evaluations and entry.rollout.mode.evaluates:
                left_out.held_out += 1
            elif not matches_itself(query, entry):
                left_out.unwanted += 1
            else:
                entries.append(entry)
        counted = await counted_of(self.store, [entry.rollout for entry in entries])
        reports = {report.attempt.rollout: report for report in await attempt_reports(self.store, counted)}
        found = []
        for entry in entries:
            report = reports.get(entry.rollout.id)
            if report is None:
                left_out.unfinished += 1
            elif not asked.takes(report):
                left_out.unwanted += 1
            else:
                found.append(Exported(entry, report))
        return found

    async def _has_others(self) -> bool:
        """Whether anything but evaluations was recorded: what `agl run` records is of their mode."""
        if self._others is None:
            modes = [mode for mode in Mode if not mode.evaluates]
            self._others = any([await self.store.rollouts(mode=mode, newest=1) for mode in modes])
        return self._others
