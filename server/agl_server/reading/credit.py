"""What recorded rollouts say of credit: is there contrast, do states repeat, do tools that work go with success?"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from agl_core.learning.tool_results import has_failed
from agl_core.types import Episode, Mode, RolloutState, Transition, are_equal
from agl_server.reading.explained import reports_of
from agl_server.reading.rollouts import groups_of
from agl_server.reading.runs import open_store

LATEST = 400
"""The rollouts of training that are looked at, at most: the newest."""
MIN_SUCCESSES, MIN_DIFFERENCE = 10, 0.25
"""Tool results are a guide if, over so many successful rollouts, a tool works so much more often than in others."""
OFTEN, REPEATED = 0.3, 0.5
"""From this share of success on rollouts tell enough; from this share of calls on, states repeat."""


@dataclass(frozen=True, slots=True)
class ToolFacts:
    """How often a tool's calls work; NaN without a call."""

    when_won: float
    """In successful rollouts: P(ok | success)."""
    otherwise: float


@dataclass(frozen=True, slots=True)
class CreditFacts:
    """A look at training rollouts. Success is a return in the upper half of their range."""

    rollouts: int
    success: float
    contrast: float
    """The share of groups whose returns differ."""
    repeated_prompts: float
    """The share of calls, first ones aside, whose token ids another rollout of the group met too."""
    repeated_states: float
    """The same of what the agent said of its state (`agl_core.state`)."""
    tools: Mapping[str, ToolFacts]

    @property
    def advice(self) -> str:
        """Which credit rule follows from this."""
        enough = self.success * self.rollouts >= MIN_SUCCESSES
        guides = [tool for tool, facts in self.tools.items() if facts.when_won - facts.otherwise >= MIN_DIFFERENCE]
        if guides and enough:
            return (
                f"credit 'air': {' and '.join(guides)} {'works' if len(guides) == 1 else 'work'} where rollouts succeed"
            )
        if self.repeated_states >= REPEATED:
            return "credit 'gigpo' with the state as its anchor: rollouts meet the same states"
        if self.repeated_prompts >= REPEATED:
            return "credit 'gigpo': rollouts meet the same prompts"
        if self.success >= OFTEN:
            return "credit 'identical': rollouts succeed often enough to tell good calls from bad ones"
        return "credit 'identical': no tool works more often where rollouts succeed, and no states repeat"

    def lines(self) -> Iterator[str]:
        yield f"{self.success:.0%} of {self.rollouts} rollouts succeed, and {self.contrast:.0%} of their groups differ"
        yield (
            f"{self.repeated_prompts:.0%} of the calls after the first meet a prompt again, and "
            f"{self.repeated_states:.0%} a state that the agent names"
        )
        for tool, facts in self.tools.items():
            won, others = ("none" if math.isnan(p) else f"{p:.0%}" for p in (facts.when_won, facts.otherwise))
            yield f"of the calls of {tool} in successful rollouts {won} work, in others {others}"


def read_credit(folder: Path) -> CreditFacts | None:
    """The facts of a run's newest training rollouts; None if fewer than two were scored."""

    async def read() -> list[list[Episode]]:
        async with open_store(folder) as store:
            done = await store.rollouts(state=RolloutState.DONE, mode=Mode.TRAIN)
            reports = {r.entry.rollout.id: r for r in await reports_of(store, done[-LATEST:])}
        groups = [[reports[rollout.id] for rollout in group] for group in groups_of(done[-LATEST:])]
        return [
            [
                replace(r.counted.episode, terminal=r.entry.reward)
                for r in group
                if r.counted and r.entry.reward is not None
            ]
            for group in groups
        ]

    groups = [group for group in asyncio.run(read()) if len(group) > 1]
    return facts_of(groups) if groups else None


def facts_of(groups: Sequence[Sequence[Episode]]) -> CreditFacts:
    """The facts of groups of two or more scored episodes."""
    terminals = [episode.terminal or 0.0 for group in groups for episode in group]
    middle = (min(terminals) + max(terminals)) / 2
    won = [value > middle for value in terminals]
    worked: dict[str, dict[bool, list[bool]]] = defaultdict(lambda: {True: [], False: []})
    for has_won, episode in zip(won, (e for group in groups for e in group), strict=True):
        for result in (result for t in episode.transitions for result in t.tool_results):
            worked[result.tool][has_won].append(not has_failed(result))
    return CreditFacts(
        rollouts=len(terminals),
        success=fmean(won),
        contrast=fmean(not are_equal(e.terminal or 0.0 for e in group) for group in groups),
        repeated_prompts=_repeated(groups, _prompt),
        repeated_states=_repeated(groups, _state),
        tools={tool: ToolFacts(_share(by[True]), _share(by[False])) for tool, by in sorted(worked.items())},
    )


def _repeated(groups: Sequence[Sequence[Episode]], place_of: Callable[[Transition], str | bytes | None]) -> float:
    """The share of calls after the first whose place another rollout of the group met too."""
    met = list[bool]()
    for group in groups:
        places = [[place_of(t) for t in episode.transitions] for episode in group]
        rollouts = Counter(place for of_episode in places for place in {*of_episode} if place is not None)
        met += [place is not None and rollouts[place] > 1 for of_episode in places for place in of_episode[1:]]
    return _share(met) if met else 0.0


def _prompt(transition: Transition) -> bytes | None:
    return None if transition.prompt_ids is None else np.asarray(transition.prompt_ids, np.int32).tobytes()


def _state(transition: Transition) -> str | None:
    return json.dumps([transition.agent, transition.state], sort_keys=True) if transition.state else None


def _share(flags: Sequence[bool]) -> float:
    return fmean(flags) if flags else math.nan
