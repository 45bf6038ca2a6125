"""Runs that are deployed, whose weights are not real, and decisions on their versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agl_online.ledger import By, Decision, Ledger, Standing, State

from ..policies.saved_runs import make_run

DEFAULT = "default"


def make_deployed(folder: Path, *steps: int, share: float = 0.5, **fields: Any) -> Ledger:
    """A run with checkpoints of these steps, deployed with what training started from."""
    make_run(folder, dict.fromkeys(steps), **fields)
    with (folder / "config.toml").open("a") as config:
        config.write(f"[online]\nmin_free_gib = 0\n[online.applications]\nshop = 1\n[learn.canary]\nshare = {share}\n")
    ledger = Ledger.of_run(folder)
    ledger.begin(DEFAULT, 0, "What training started from.")
    return ledger


def decide(
    ledger: Ledger,
    step: int,
    state: State,
    by: By = By.GATE,
    figures: Mapping[str, float] | None = None,
    *,
    untested: bool = False,
) -> Standing:
    return ledger.record(Decision(DEFAULT, step, state, by, f"{state} now.", figures or {}), untested=untested)


def make_canary(ledger: Ledger, step: int) -> Standing:
    """Through the gate, and then to a share of the sessions."""
    decide(ledger, step, State.CANDIDATE, By.TRAINING)
    decide(ledger, step, State.PASSED)
    return decide(ledger, step, State.CANARY, By.CANARY)


def make_stable(ledger: Ledger, step: int) -> Standing:
    """The whole way."""
    make_canary(ledger, step)
    return decide(ledger, step, State.STABLE, By.CANARY)
