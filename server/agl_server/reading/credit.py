"""The advice of recorded rollouts on credit: is there contrast, do states repeat, do tools work where they succeed?"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from agl_core.types import RecordedRollout, ToolStatus, are_equal
from agl_server.reading.rollouts import RecordedRun, groups_of
from agl_server.reading.runs import is_capture
from agl_server.training.lineages import episode_of

LATEST, READ_TOGETHER = 400, 50
"""The training rollouts that are looked at, at most (the newest), and those that are in memory at the same time."""
MIN_SUCCESSES, MIN_CALLS, MIN_DIFFERENCE = 10, 10, 0.25
"""Tool results are a guide if, over so many successful rollouts, and calls in these and in others, a tool works so much
more often than in others."""


@dataclass(frozen=True, slots=True)
class CreditFacts:
    """A look at training rollouts. Success is a terminal reward in the upper half of their range."""

    rollouts: int
    successes: int
    contrast: float
    """The share of groups whose terminal rewards differ."""
    prompts: float
    """The share of calls, first ones aside, whose prompt's token ids another rollout of the group met too."""
    states: float
    """The same of the state that the agent names (`agl_core.state`)."""
    tools: Mapping[str, tuple[Sequence[bool], Sequence[bool]]]
    """For each call of a tool whether it worked, in successful rollouts and in others."""

    @property
    def advice(self) -> str:
        """Which credit rule follows from this.

        States that repeat speak for none: rules that compare them were no better than `identical` in games of nothing
        but such states (docs/experiments.md).
        """
        guides = [
            tool
            for tool, (won, others) in self.tools.items()
            if min(len(won), len(others)) >= MIN_CALLS and fmean(won) - fmean(others) >= MIN_DIFFERENCE
        ]
        if guides and self.successes >= MIN_SUCCESSES:
            return f"credit 'air': where rollouts succeed, more calls work of {', '.join(guides)}"
        if self.tools and self.successes < MIN_SUCCESSES:
            return f"credit 'identical', until {MIN_SUCCESSES} successes tell whether tools that work go with them"
        return "credit 'identical': nothing that was recorded speaks for another rule"

    def lines(self) -> Iterator[str]:
        yield f"{self.successes} of {self.rollouts} rollouts succeed, and {self.contrast:.0%} of their groups differ"
        yield f"{self.prompts:.0%} of the calls after the first meet a prompt again, {self.states:.0%} a named state"
        for tool, flags in self.tools.items():
            won, others = (f"{fmean(worked):.0%}" if worked else "none" for worked in flags)
            yield f"calls of {tool} that work: {won} in successful rollouts, {others} in others"


@dataclass(frozen=True, slots=True)
class _Played:
    """A rollout, without its conversations and token ids: those of hundreds would need gigabytes."""

    reward: float
    works: Sequence[tuple[str, bool]]
    """The tool of each tool result, and whether it worked, as credit `air` counts."""
    prompts: Sequence[int | None]
    states: Sequence[str | None]
    """By call; None if it is not known."""

    @classmethod
    def of(cls, recorded: RecordedRollout, reward: float) -> _Played:
        transitions = episode_of(recorded).transitions
        return cls(
            reward,
            [(result.tool, result.status is ToolStatus.OK) for t in transitions for result in t.tool_results],
            [None if t.prompt_ids is None else hash(t.prompt_ids.tobytes()) for t in transitions],
            [json.dumps([t.agent, t.state], sort_keys=True) if t.state else None for t in transitions],
        )


def read_credit(folder: Path) -> CreditFacts | None:
    """The facts of a run's newest training or imported rollouts; None if no two rewards were compared."""
    run = RecordedRun(folder)
    is_recorded = is_capture(folder)  # Its rollouts are of no training, and those of a task are compared.
    newest = [rollout for rollout in run.rollouts if is_recorded or rollout.mode.trains][-LATEST:]
    played = {
        r.rollout.id: _Played.of(r, r.terminal)
        for start in range(0, len(newest), READ_TOGETHER)
        for r in asyncio.run(run.read(newest[start : start + READ_TOGETHER]))
        if r.terminal is not None
    }
    groups = [[played[r.id] for r in group if r.id in played] for group in groups_of(newest)]
    groups = [group for group in groups if len(group) > 1]
    return _facts(groups) if groups else None


def _facts(groups: Sequence[Sequence[_Played]]) -> CreditFacts:
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [rollout.reward for rollout in rollouts]
    middle = 0.0 if are_equal(rewards) else (min(rewards) + max(rewards)) / 2
    works: dict[str, tuple[list[bool], list[bool]]] = defaultdict(lambda: ([], []))
    for rollout in rollouts:
        for tool, has_worked in rollout.works:
            works[tool][rollout.reward <= middle].append(has_worked)
    return CreditFacts(
        rollouts=len(rollouts),
        successes=sum(reward > middle for reward in rewards),
        contrast=fmean(not are_equal(rollout.reward for rollout in group) for group in groups),
        prompts=_repeated([[rollout.prompts for rollout in group] for group in groups]),
        states=_repeated([[rollout.states for rollout in group] for group in groups]),
        tools=dict(sorted(works.items())),
    )


def _repeated(groups: Iterable[Sequence[Sequence[Hashable]]]) -> float:
    """The share of calls after the first whose state another rollout of the group met too."""
    met = list[bool]()
    for group in groups:
        rollouts = Counter(state for states in group for state in {*states} - {None})
        met += [rollouts[state] > 1 for states in group for state in states[1:]]
    return fmean(met) if met else 0.0
