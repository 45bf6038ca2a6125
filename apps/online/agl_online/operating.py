"""What an operator sees of a run's versions, and decides by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agl_core.reading.runs import policy_names
from agl_core.training.checkpoints import HEADLINE_SET
from agl_online.ledger import By, Decision, Ledger, LedgerError, Live, Standing, State
from agl_online.policies.naming import Reference, called, parse

_BY_HAND = "An operator decided so."


@dataclass(frozen=True, slots=True)
class VersionEntry:
    """One version as a list shows it."""

    name: str
    """As `calc@40`."""
    policy: str
    step: int
    state: State
    since: float
    """When that was decided, in Unix seconds."""
    by: By
    reason: str
    greedy: float | None
    """Its mean reward at the gate, by greedy replies to the headline set."""
    sampled: float | None
    live: float | None
    """The mean reward of its sessions beside those of another version."""
    sessions: int | None
    """How many these were."""
    decisions: Sequence[Decision]
    """All of them, with the figures that made them."""


def list_versions(run: Path) -> list[VersionEntry]:
    """The versions on which anything was decided, by policy and step. LedgerError if the run was never deployed."""
    ledger = _ledger(run)
    return [entry for policy in policy_names(run) for entry in _of_policy(ledger, policy)]


def promote(name: str, *, untested: bool = False, reason: str | None = None) -> str:
    """Make a version the stable one: that named, else the canary, else what passed the gate. Returns its name."""
    ledger, reference, standing = _deployed(name)
    step = _step(name, reference, standing.canary if standing.canary is not None else standing.passed)
    if step is None:
        raise LedgerError(f"No version of {reference.name} waits to be promoted. Name one: {reference.name}@STEP.")
    return _decided(ledger, reference, step, State.STABLE, reason, untested=untested)


def roll_back(name: str, *, reason: str | None = None) -> str:
    """Withdraw a version: that named, else the canary, else the stable one. Returns its name."""
    ledger, reference, standing = _deployed(name)
    step = _step(name, reference, standing.stable if standing.canary is None else standing.canary)
    assert step is not None
    return _decided(ledger, reference, step, State.ROLLED_BACK, reason)


def pin(name: str, *, untested: bool = False, reason: str | None = None) -> str:
    """Have a version alone answer all sessions: that named, else the stable one. Returns its name."""
    ledger, reference, standing = _deployed(name)
    step = _step(name, reference, standing.stable)
    assert step is not None
    return _decided(ledger, reference, step, State.PINNED, reason, untested=untested)


def unpin(name: str, *, reason: str | None = None) -> str:
    """End a policy's pin; returns the name of the version that is stable."""
    ledger, reference, _ = _deployed(name)
    standing = ledger.unpin(reference.policy, reason or _BY_HAND)
    return f"{reference.name}@{standing.stable}"


def _ledger(run: Path) -> Ledger:
    ledger = Ledger.of_run(run)
    if not ledger.exists:
        raise LedgerError(
            f"{run} was never deployed: it has no ledger of versions. Deploy it with `agl learn`; a version of a run "
            f"that is not deployed is marked by `agl policy promote`."
        )
    return ledger


def _deployed(name: str) -> tuple[Ledger, Reference, Standing]:
    reference = parse(name)
    ledger = _ledger(reference.run)
    standing = ledger.current(reference.policy)
    if standing.stable is None:
        raise LedgerError(f"{reference.name} was never deployed: nothing is stable. Deploy it with `agl learn`.")
    return ledger, reference, standing


def _step(name: str, reference: Reference, otherwise: int | None) -> int | None:
    """The step that a name has, or else another."""
    return reference.resolve().step if "@" in name else otherwise


def _decided(
    ledger: Ledger, reference: Reference, step: int, state: State, reason: str | None, *, untested: bool = False
) -> str:
    ledger.record(Decision(reference.policy, step, state, By.OPERATOR, reason or _BY_HAND), untested=untested)
    return f"{reference.name}@{step}"


def _of_policy(ledger: Ledger, policy: str) -> list[VersionEntry]:
    decisions, standing, live = ledger.decisions(policy), ledger.current(policy), ledger.live(policy)
    found = []
    for step in sorted({each.step for each in decisions}):
        own = [each for each in decisions if each.step == step]
        state = standing.state(step)
        assert state is not None
        last = next((each for each in reversed(own) if each.state is state), own[-1])
        gate = next((each.figures for each in reversed(own) if each.by is By.GATE and each.figures), {})
        reward, sessions = _live(step, decisions, live, standing)
        since = last.time if last.state is state else _replaced(step, decisions, last.time)
        found.append(
            VersionEntry(
                name=f"{called(ledger.run, policy)}@{step}",
                policy=policy,
                step=step,
                state=state,
                since=since,
                by=last.by,
                reason=last.reason,
                greedy=_headline(gate, "greedy"),
                sampled=_headline(gate, "sampled"),
                live=reward,
                sessions=sessions,
                decisions=own,
            )
        )
    return found


def _replaced(step: int, decisions: Sequence[Decision], otherwise: float) -> float:
    """When a version that was stable was replaced by a later one."""
    later = [each.time for each in decisions if each.state is State.STABLE and each.step != step]
    return max((time for time in later if time >= otherwise), default=otherwise)


def _live(
    step: int, decisions: Sequence[Decision], live: Live | None, standing: Standing
) -> tuple[float | None, int | None]:
    """The mean reward and the number of the sessions that a version answered beside another one, the last time."""
    if live is not None and step in (live.step, standing.stable):
        return _arm(live.figures, "canary" if step == live.step else "stable")
    own = [each for each in decisions if each.step == step and "canary/sessions" in each.figures]
    return _arm(own[-1].figures, "canary") if own else (None, None)


def _arm(figures: Mapping[str, float], arm: str) -> tuple[float | None, int | None]:
    sessions = figures.get(f"{arm}/sessions")
    return figures.get(f"{arm}/reward"), None if sessions is None else int(sessions)


def _headline(figures: Mapping[str, float], mode: str) -> float | None:
    """The reward of the set `eval`, else of the first one."""
    end = f"/{mode}/reward/mean"
    of_set = figures.get(f"{HEADLINE_SET}{end}")
    return next((value for key, value in figures.items() if key.endswith(end)), None) if of_set is None else of_set
