"""Every decision on the versions of a run's policies, durable in the run's folder."""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from agl_core import private
from agl_core.analysis.runs import policy_names
from agl_core.deployment.standing import By, Decision, Standing, State, standings
from agl_core.errors import LedgerError, nearest
from agl_core.training.checkpoints import CHECKPOINTS, Checkpoints

LEDGER_FILE = "versions.jsonl"
"""One decision on each line."""
_LIVE_FILE = "versions-live.json"
"""The latest figures of each policy's canary."""


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

    def promotions(self) -> list[float]:
        """When another version became the stable one, in Unix seconds. LedgerError if the file is damaged."""
        stable = (each for each in self.decisions() if each.state is State.STABLE)
        return [each.time for each in stable if each.by is not By.START]

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
