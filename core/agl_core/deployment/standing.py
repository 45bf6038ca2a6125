"""What each version of a policy is, as the decisions on it say, and which decision may follow: pure functions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class State(StrEnum):
    """What a version is."""

    CANDIDATE = "candidate"
    """It has a checkpoint, and was not tested."""
    REJECTED = "rejected"
    """It did not pass the gate."""
    PASSED = "passed"
    """It passed the gate, and waits for its canary."""
    CANARY = "canary"
    """It answers a share of the sessions."""
    STABLE = "stable"
    """It answers all the others."""
    RETIRED = "retired"
    """A later version took its place."""
    ROLLED_BACK = "rolled_back"
    """It was served, and withdrawn as worse."""
    PINNED = "pinned"
    """It alone answers, until an operator unpins it. Then it is what it was before."""


class By(StrEnum):
    """Who decided."""

    START = "start"
    """Nobody: it is what the run was deployed with."""
    TRAINING = "training"
    """Nobody: training wrote a checkpoint."""
    GATE = "gate"
    CANARY = "canary"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Decision:
    """That a version became something, and why."""

    policy: str
    step: int
    """The version: the step of its checkpoint; 0: what training started from."""
    state: State
    by: By
    reason: str
    """One sentence for people."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """The numbers that made it."""
    time: float = field(default_factory=time.time)
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class Standing:
    """All versions of one policy, after some decisions."""

    policy: str
    decided: Mapping[int, Decision] = field(default_factory=dict)
    """The last decision on each version, by its step."""
    stables: tuple[int, ...] = ()
    """The versions that were stable and were not rolled back, in their order; the last one is."""
    canary: int | None = None
    pinned: int | None = None
    tested: frozenset[int] = frozenset()
    """Versions that passed the gate, or that the run was deployed with."""

    @property
    def stable(self) -> int | None:
        """The stable version; None before the policy is deployed."""
        return self.stables[-1] if self.stables else None

    @property
    def previous(self) -> int | None:
        """What is stable again if the stable version is rolled back."""
        return self.stables[-2] if len(self.stables) > 1 else None

    @property
    def passed(self) -> int | None:
        """The latest version that waits for its canary."""
        waiting = (step for step, decision in self.decided.items() if decision.state is State.PASSED)
        return max(waiting, default=None)

    @property
    def serving(self) -> list[int]:
        """The versions that answer sessions, the one with most of them first."""
        if self.pinned is not None:
            return [self.pinned]
        return [step for step in (self.stable, self.canary) if step is not None]

    @property
    def kept(self) -> list[int]:
        """The versions whose checkpoints are needed, the stable one first."""
        found = (self.stable, self.pinned, self.canary, self.passed, self.previous)
        return list(dict.fromkeys(step for step in found if step is not None))

    def state(self, step: int) -> State | None:
        """What a version is now; None if nothing was ever decided on it."""
        return State.PINNED if step == self.pinned else self.unpinned_state(step)

    def unpinned_state(self, step: int) -> State | None:
        """What a version is apart from a pin."""
        if step == self.stable:
            return State.STABLE
        if step in self.stables and step != self.canary:
            return State.RETIRED
        decision = self.decided.get(step)
        return None if decision is None else decision.state

    def after(self, decision: Decision) -> Standing:
        """The same after one more decision; a pinned version's is the end of its pin."""
        step, state = decision.step, decision.state
        if step == self.pinned:
            return replace(self, pinned=None)
        if state is State.PINNED:
            unknown = {} if step in self.decided else {step: replace(decision, state=State.CANDIDATE)}
            return replace(self, decided={**self.decided, **unknown}, pinned=step)
        standing = replace(
            self, decided={**self.decided, step: decision}, canary=None if step == self.canary else self.canary
        )
        others = tuple(each for each in self.stables if each != step)
        match state:
            case State.PASSED:
                return replace(standing, tested=self.tested | {step})
            case State.REJECTED:
                return replace(standing, tested=self.tested - {step})
            case State.CANARY:
                return replace(standing, canary=step)
            case State.STABLE:
                tested = self.tested | {step} if decision.by is By.START else self.tested
                return replace(standing, stables=(*others, step), tested=tested)
            case State.ROLLED_BACK if step != self.canary:
                return replace(standing, stables=others)
        return standing

    def problem(self, decision: Decision, *, untested: bool = False) -> str | None:
        """Why a decision makes no sense now; None if it does. `untested`: an operator takes what the gate did not pass.

        Whether the version has a checkpoint is not asked.
        """
        step, state, now = decision.step, decision.state, self.state(decision.step)
        if step == self.pinned:
            is_unpin = decision.by is By.OPERATOR and state in (self.unpinned_state(step), State.CANDIDATE)
            return None if is_unpin else f"It is pinned: agl versions unpin {self.policy} ends that."
        if decision.by is By.START:
            return None if self.stable is None else f"Version {self.stable} is stable already."
        if self.stable is None:
            return "Nothing is stable yet: the policy was never deployed."
        if state in (State.CANARY, State.STABLE, State.PINNED) and self.pinned is not None:
            return f"Version {self.pinned} is pinned, and alone answers until it is unpinned."
        if state in (State.CANARY, State.STABLE, State.PINNED) and step not in self.tested and not untested:
            return "The gate did not pass it. An operator may promote it untested (--untested)."
        if decision.by is By.CANARY and state is not State.CANARY and step != self.canary:
            return f"It is {now or 'unknown'} and not the canary any more."
        match state:
            case State.CANDIDATE | State.PASSED | State.REJECTED | State.RETIRED:
                wrong = now in (State.CANARY, State.STABLE)
                return f"It is {now} now, and answers sessions." if wrong else None
            case State.CANARY if self.canary is not None:
                return f"Version {self.canary} is the canary; there is one at a time."
            case State.CANARY | State.STABLE if step == self.stable:
                return "It is stable already."
            case State.ROLLED_BACK if now is State.STABLE and self.previous is None:
                return "There is nothing to roll back to: no other version was stable before."
            case State.ROLLED_BACK if now not in (State.CANARY, State.STABLE):
                return f"It is {now or 'unknown'}, and answers no sessions."
        return None


def standings(decisions: Iterable[Decision]) -> dict[str, Standing]:
    """The standing of each policy after these decisions, in their order."""
    found: dict[str, Standing] = {}
    for each in decisions:
        found[each.policy] = found.get(each.policy, Standing(each.policy)).after(each)
    return found
