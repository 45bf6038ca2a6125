"""The versions of a deployed run: their states, which decision may follow, and the durable ledger of decisions."""

from __future__ import annotations

import fcntl
import functools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from agl_core import private
from agl_core.errors import AglError
from agl_server.reading.runs import policy_names
from agl_server.training.checkpoints import CHECKPOINTS, VERSIONS_FILE, Checkpoints


class LedgerError(AglError, ValueError):
    """A decision on a version makes no sense after those before it, or the ledger cannot be read."""


class State(StrEnum):
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


class DecidedBy(StrEnum):
    """Who decided."""

    START = "start"
    """The run was deployed with it."""
    TRAINING = "training"
    """Training wrote a checkpoint."""
    GATE = "gate"
    CANARY = "canary"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Decision:
    """The new state of a version, and why."""

    step: int
    """The version: its checkpoint's step, 0 for the first weights."""
    state: State
    by: DecidedBy
    reason: str
    """One sentence for people."""
    figures: Mapping[str, float] = field(default_factory=dict)
    kept: Sequence[int] = ()
    """The versions whose checkpoints are needed from then on, the stable one first; set when it is recorded."""
    time: float = field(default_factory=time.time)
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class VersionsNow:
    """All versions, after some decisions."""

    decided: Mapping[int, Decision] = field(default_factory=dict)
    """The last decision on each version, by its step."""
    stables: tuple[int, ...] = ()
    """The versions that became stable and were not rolled back, in order; the last one is stable now."""

    @property
    def stable(self) -> int | None:
        """The stable version; None before the run is deployed."""
        return self.stables[-1] if self.stables else None

    @property
    def previous(self) -> int | None:
        """The version that is stable again if the stable one is rolled back."""
        return self.stables[-2] if len(self.stables) > 1 else None

    @property
    def canary(self) -> int | None:
        return self._latest(State.CANARY)

    @property
    def passed(self) -> int | None:
        """The latest version that waits for its canary."""
        return self._latest(State.PASSED)

    @property
    def serving(self) -> list[int]:
        """The versions that answer sessions, the stable one first."""
        return [step for step in (self.stable, self.canary) if step is not None]

    @property
    def kept(self) -> list[int]:
        """The versions whose checkpoints are needed, the stable one first."""
        needed = (self.stable, self.canary, self.passed, self.previous)
        return list(dict.fromkeys(step for step in needed if step is not None))

    def state(self, step: int) -> State | None:
        """The state of a version; None if nothing was ever decided on it."""
        if step == self.stable:
            return State.STABLE
        if step in self.stables and step != self.canary:
            return State.RETIRED
        decision = self.decided.get(step)
        return None if decision is None else decision.state

    def after(self, decision: Decision) -> VersionsNow:
        step, stables = decision.step, self.stables
        others = tuple(stable for stable in stables if stable != step)
        if decision.state is State.STABLE:
            stables = (*others, step)
        elif decision.state is State.ROLLED_BACK and step != self.canary:
            stables = others
        return VersionsNow({**self.decided, step: decision}, stables)

    def _latest(self, state: State) -> int | None:
        """The latest version on which this was the last decision."""
        return max((step for step, decision in self.decided.items() if decision.state is state), default=None)

    def problem(self, decision: Decision) -> str | None:
        """Why a decision makes no sense now; None if it does. Checkpoints are not looked for."""
        step, state, now = decision.step, decision.state, self.state(decision.step)
        if decision.by is DecidedBy.START:
            return None if self.stable is None else f"Version {self.stable} is stable already."
        if self.stable is None:
            return "Nothing is stable yet: the run was never deployed."
        if decision.by is DecidedBy.CANARY and state is not State.CANARY and step != self.canary:
            return f"It is {now or 'unknown'} and not the canary any more."
        is_serving = now in (State.CANARY, State.STABLE)
        if state is State.ROLLED_BACK:
            if now is State.STABLE and self.previous is None:
                return "There is nothing to roll back to: no other version was stable before."
            return None if is_serving else f"It is {now or 'unknown'}, and answers no sessions."
        if state not in (State.CANARY, State.STABLE):
            return f"It is {now} now, and answers sessions." if is_serving else None
        if now in (None, State.CANDIDATE, State.REJECTED):
            return "The gate did not pass it."
        if state is State.CANARY and self.canary is not None:
            return f"Version {self.canary} is the canary; there is one at a time."
        return "It is stable already." if step == self.stable else None


@dataclass(frozen=True)
class Ledger:
    """The ledger of the run in this folder; it may be empty. Any number of processes may read and write it.

    Each decision names the versions that it needs: so `NAME@stable` is found, and their checkpoints are kept.
    """

    run: Path

    @property
    def file(self) -> Path:
        return self.run / VERSIONS_FILE

    def decisions(self) -> list[Decision]:
        """All decisions, the oldest first; a last line may be incomplete. LedgerError if the file is damaged."""
        content = self.file.read_bytes() if self.file.exists() else b""
        decisions = []
        for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
            try:
                read: dict[str, Any] = orjson.loads(line)
                decisions.append(Decision(**{**read, "state": State(read["state"]), "by": DecidedBy(read["by"])}))
            except (ValueError, TypeError, LookupError) as error:
                raise LedgerError(
                    f"Line {number} of {self.file} is no decision ({error!r}). Restore the file from a backup, or "
                    f"remove the line if you know what it decided."
                ) from error
        return decisions

    def current(self) -> VersionsNow:
        return functools.reduce(VersionsNow.after, self.decisions(), VersionsNow())

    def begin(self, step: int, reason: str) -> None:
        """Deploy the run with this version as its stable one; if it is deployed already, nothing changes."""
        if self.current().stable is None:
            self.record(Decision(step, State.STABLE, DecidedBy.START, reason))

    def record(self, decision: Decision) -> VersionsNow:
        """Write a decision, durably; returns the versions then. LedgerError for a `VersionsNow.problem`."""
        with open(self.file, "a+b", opener=private.opener) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # A kill left the last line incomplete.
            versions = self.current()
            problem = versions.problem(decision) or self._missing(versions, decision)
            if problem is not None:
                raise LedgerError(f"Version {decision.step} of {self.run} cannot become {decision.state}. {problem}")
            versions = versions.after(decision)
            # JSON cannot say what is not finite.
            figures = {name: float(value) for name, value in decision.figures.items() if math.isfinite(value)}
            file.write(orjson.dumps(asdict(replace(decision, figures=figures, kept=versions.kept))) + b"\n")
            file.flush()
            os.fsync(file.fileno())
            return versions

    def _missing(self, versions: VersionsNow, decision: Decision) -> str | None:
        """The error if the version that is served after a decision has no checkpoint."""
        step: int | None = decision.step
        if decision.state is State.ROLLED_BACK:
            step = versions.previous if step == versions.stable else None
        if not step or decision.state is State.REJECTED:
            return None
        [policy, *_] = policy_names(self.run)  # A run that is deployed has one.
        saved = Checkpoints(self.run / CHECKPOINTS, keep=1).path(step) / policy / "model"
        return None if saved.is_dir() else f"There is no checkpoint of step {step}."
