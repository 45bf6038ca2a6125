"""Runs that are deployed, whose weights are not real, and decisions on their versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agl_online.versions import DecidedBy, Decision, Ledger, State, VersionsNow

from ..policies.saved_runs import make_run


def make_deployed(folder: Path, *steps: int, **fields: Any) -> Ledger:
    """A run with checkpoints of these steps, deployed with what training started from."""
    make_run(folder, dict.fromkeys(steps), **fields)
    with (folder / "config.toml").open("a") as config:
        config.write("[online.applications]\nshop = 1\n[learn.canary]\nshare = 0.5\n")
    ledger = Ledger(folder)
    ledger.begin(0, "What training started from.")
    return ledger


def decide(
    ledger: Ledger, step: int, state: State, by: DecidedBy = DecidedBy.GATE, figures: Mapping[str, float] | None = None
) -> VersionsNow:
    return ledger.record(Decision(step, state, by, f"{state} now.", figures or {}))


def make_passed(ledger: Ledger, step: int) -> VersionsNow:
    """Through the gate."""
    decide(ledger, step, State.CANDIDATE, DecidedBy.TRAINING)
    return decide(ledger, step, State.PASSED)


def make_canary(ledger: Ledger, step: int) -> VersionsNow:
    """Through the gate, and then to a share of the sessions."""
    make_passed(ledger, step)
    return decide(ledger, step, State.CANARY, DecidedBy.CANARY)


def make_stable(ledger: Ledger, step: int) -> VersionsNow:
    """The whole way."""
    make_canary(ledger, step)
    return decide(ledger, step, State.STABLE, DecidedBy.CANARY)
