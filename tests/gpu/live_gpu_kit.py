"""veRL's part of the kit, played on the CPU. Needs veRL, Ray and vLLM (`make test-verl`)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .test_gpu_kit import ROOT


@pytest.mark.timeout(3600)
def test_verls_parts_play_on_a_cpu() -> None:
    chosen = ("--device", "cpu", "--minutes", "55", "--part", "verl_steps")
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", *chosen], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "ot run: " not in done.stdout
    for row in ("1", "2", "3, resumed"):
        assert f"| {row} | " in done.stdout
