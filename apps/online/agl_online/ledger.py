"""The versions of a run's policies: what each is, which decision may follow, and the durable ledger of decisions."""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from agl_core import private
from agl_core.errors import AglError, nearest
from agl_core.reading.runs import policy_names
from agl_core.training.checkpoints import CHECKPOINTS, Checkpoints

LEDGER_FILE = "versions.jsonl"
"""One decision on each line."""
_LIVE_FILE = "versions-live.json"
"""The latest figures of each policy's canary."""


class LedgerError(AglError, ValueError):
    """A decision on a version makes no sense after those before it, or the ledger cannot be read."""


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


@dataclass(frozen=True)
class Live:
    """What was last seen of a canary."""

    step: int
    time: float
    """Unix seconds."""
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Ledger:
    """The ledger of one run. Any number of processes may read and write it.

        ledger = Ledger.of_run(run_dir)
        ledger.begin("default", 0, "what training started from")
        ledger.record(Decision("default", 20, State.CANDIDATE, By.START, "a checkpoint was written"))
        ledger.current("default").stable

    The stable version is also the run's mark `stable`, so that `NAME@stable` means it, and the checkpoints that it
    needs are kept. The file comes first: a mark that a kill left behind is put right by the next `settle` or `record`.
    """

    run: Path

    @classmethod
    def of_run(cls, run: Path) -> Ledger:
        """The ledger of a run's folder; it may be empty."""
        return cls(run)

    @property
    def file(self) -> Path:
        return self.run / LEDGER_FILE

    @property
    def exists(self) -> bool:
        """Whether the run was ever deployed."""
        return self.file.exists()

    def decisions(self, policy: str | None = None) -> list[Decision]:
        """All decisions, or those on one policy, the oldest first. LedgerError if the file is damaged.

        A last line that a kill left incomplete was never decided, and is left out.
        """
        try:
            content = self.file.read_bytes()
        except FileNotFoundError:
            return []
        return [each for each in _parsed(content, self.file) if policy in (None, each.policy)]

    def current(self, policy: str) -> Standing:
        """What each version of a policy is now. LedgerError if the run has no such policy."""
        self._check_policy(policy)
        return standings(self.decisions()).get(policy, Standing(policy))

    def begin(self, policy: str, step: int, reason: str) -> Standing:
        """Deploy a policy with this version as its stable one; if it is deployed already, nothing changes."""
        with self._open() as file:
            standing = self._standing(file, policy)
            if standing.stable is None:
                standing = self._write(file, Decision(policy, step, State.STABLE, By.START, reason))
            self._mark(standing)
            return standing

    def record(self, decision: Decision, *, untested: bool = False) -> Standing:
        """Write a decision, durably, and mark what follows from it. Returns what the versions are then.

        `untested`: an operator accepts a version that the gate did not pass. LedgerError if the decision makes no
        sense: the version is unknown, another one is the canary, nothing is left to roll back to, …
        """
        self._check_policy(decision.policy)
        with self._open() as file:
            standing = self._standing(file, decision.policy)
            problem = standing.problem(decision, untested=untested and decision.by is By.OPERATOR)
            if problem is None:
                problem = self._missing(decision.policy, _needed(standing, decision))
            if problem is not None:
                name = f"{decision.policy}@{decision.step}"
                raise LedgerError(f"{name} in {self.run} cannot become {decision.state}. {problem}")
            standing = self._write(file, decision)
            self._mark(standing)
            return standing

    def unpin(self, policy: str, reason: str) -> Standing:
        """End a pin: the version is what it was before. LedgerError if none is pinned."""
        standing = self.current(policy)
        step = standing.pinned
        if step is None:
            raise LedgerError(f"No version of '{policy}' is pinned in {self.run}.")
        state = standing.unpinned_state(step) or State.CANDIDATE
        return self.record(Decision(policy, step, state, By.OPERATOR, reason))

    def settle(self) -> None:
        """Put right the marks that a kill between a decision and its mark left behind."""
        with self._open() as file:
            for standing in standings(_parsed(_content(file), self.file)).values():
                self._mark(standing)

    def note(self, policy: str, step: int, figures: Mapping[str, float]) -> None:
        """Keep the latest figures of a canary that is being watched, for people to see."""
        live = {name: asdict(each) for name, each in self._all_live().items()}
        live[policy] = asdict(Live(step, time.time(), _finite(figures)))
        part = self.run / f".{_LIVE_FILE}.part"
        private.write(part, orjson.dumps(live))
        os.replace(part, self.run / _LIVE_FILE)

    def live(self, policy: str) -> Live | None:
        """The latest figures of the policy's canary; None if there is none, or nothing was seen of it yet."""
        found = self._all_live().get(policy)
        return found if found is not None and found.step == self.current(policy).canary else None

    def _all_live(self) -> dict[str, Live]:
        try:
            read = orjson.loads((self.run / _LIVE_FILE).read_bytes())
            return {name: Live(**each) for name, each in read.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        """The file, locked against other writers, without an incomplete last line."""
        with open(self.file, "a+b", opener=private.opener) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            content = _content(file)
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                file.truncate(whole)
            yield file

    def _standing(self, file: BinaryIO, policy: str) -> Standing:
        return standings(_parsed(_content(file), self.file)).get(policy, Standing(policy))

    def _write(self, file: BinaryIO, decision: Decision) -> Standing:
        line = asdict(replace(decision, figures=_finite(decision.figures)))
        file.write(orjson.dumps(line) + b"\n")
        file.flush()
        os.fsync(file.fileno())
        return self._standing(file, decision.policy)

    def _mark(self, standing: Standing) -> None:
        if standing.stable is not None:
            Checkpoints(self.run / CHECKPOINTS, keep=1).mark_stable(standing.policy, standing.stable, standing.kept)

    def _check_policy(self, policy: str) -> None:
        known = policy_names(self.run)
        if policy not in known:
            raise LedgerError(f"The run {self.run} has no policy '{policy}'. {nearest(policy, known)}")

    def _missing(self, policy: str, step: int | None) -> str | None:
        """What is wrong if a version is not there."""
        if not step:
            return None
        checkpoints = Checkpoints(self.run / CHECKPOINTS, keep=1)
        if (checkpoints.path(step) / policy / "model").is_dir():
            return None
        steps = [0, *(int(each.name.rpartition("-")[2]) for each in checkpoints.all())]
        return f"There is no checkpoint of step {step}. There are: {', '.join(map(str, steps))}."


def _needed(standing: Standing, decision: Decision) -> int | None:
    """The version that has to be there for a decision to hold."""
    if decision.state is State.ROLLED_BACK:
        return standing.previous if decision.step == standing.stable else None
    return None if decision.state in (State.REJECTED, State.RETIRED) else decision.step


def _content(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()


def _parsed(content: bytes, file: Path) -> list[Decision]:
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    return [_decision(line, number, file) for number, line in enumerate(lines, 1)]


def _decision(line: bytes, number: int, file: Path) -> Decision:
    try:
        read: dict[str, Any] = orjson.loads(line)
        return Decision(**{**read, "state": State(read["state"]), "by": By(read["by"])})
    except (ValueError, TypeError, LookupError) as error:
        raise LedgerError(
            f"Line {number} of {file} is no decision ({error!r}). Restore the file from a backup, or remove the line "
            f"if you know what it decided."
        ) from error


def _finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Without what JSON cannot say."""
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}
