"""The parity bench of agl-verl (docs/verl-parity.md) on one GPU: veRL's training workers over nccl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .parts import Setup, Table

ROOT = Path(__file__).parents[2]
COLUMNS = ("algorithm", "advantages: difference", "loss: difference", "change: cosine", "change: norm, relative")
BENCH = "algorithms.verl.tests.make_parity"


def measure(setup: Setup, seconds: float) -> Table:
    command = [sys.executable, "-m", BENCH, "--device", setup.device]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    return table(json.loads(done.stdout.splitlines()[-1]))


def environment() -> dict[str, str]:
    """With agl's part of veRL's workers named: used from source, it has no entry point."""
    return {"VERL_USE_EXTERNAL_MODULES": "agl_verl.verl_plugin", **os.environ}


def table(cases: dict[str, dict[str, Any] | str]) -> Table:
    """Of what the bench says: by case what it measured, or why it was not run."""
    rows, beyond = [], []
    for name, case in cases.items():
        if isinstance(case, str):
            rows.append((name, f"not run: {case}", "", "", ""))
            continue
        rows.append(
            (
                name,
                f"{case['advantages']:.1e}",
                f"{case['loss']:.1e}",
                f"1 - {1 - case['cosine']:.1e}",
                f"{case['norm']:.1e}",
            )
        )
        if not case["within"]:
            beyond.append(f"{name}: the engines' updates are further apart than docs/verl-parity.md allows.")
    return Table(COLUMNS, rows, beyond)
