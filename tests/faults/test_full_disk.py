"""A disk that gets full under a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .fault_run import PATIENCE

SCRIPT = "tests.faults.full_disk"
ROOT = Path(__file__).parents[2]
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
"""Where one may mount a disk of one's own, which nobody else sees."""


def may_mount() -> bool:
    try:
        return (
            subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0
        )
    except FileNotFoundError:
        return False


@pytest.mark.storm
@pytest.mark.timeout(3 * PATIENCE + 60)
@pytest.mark.skipif(not may_mount(), reason="this system lets users mount no disk of their own (unshare)")
def test_a_full_disk_only_costs_time(tmp_path: Path, seed: int) -> None:
    done = subprocess.run(
        [*NAMESPACE, sys.executable, "-m", SCRIPT, tmp_path, str(seed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
