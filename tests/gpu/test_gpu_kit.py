"""The kit itself: what it notices; on a GPU, whether that computes what the CPU computes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from .__main__ import Part, play
from .agreement import BOUNDS, compare
from .kit import CALC, Setup, Table

ROOT = Path(__file__).parents[2]


async def broken(setup: Setup) -> Table:
    raise ValueError("no such luck\nand more")


async def far(setup: Setup) -> Table:
    return Table(("one", "two"), [("1", "2")], ["It is too far."])


def test_a_part_that_fails_or_is_too_far_is_told(tmp_path: Path) -> None:
    def run(part: Part, name: str) -> tuple[str, bool]:
        return play(part, "cpu", tmp_path / name, time.monotonic() + 60)

    assert run(broken, "a") == ("**It failed: ValueError: no such luck**", False)
    text, good = run(far, "c")
    assert text.startswith("| one | two |\n| --- | --- |\n| 1 | 2 |\n\n**It is too far.**")
    assert not good


@pytest.mark.storm
def test_the_parts_of_the_torch_engine_play_on_a_cpu() -> None:
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("| calc policy, 0.9M | cpu, ") == len(BOUNDS)
    assert done.stdout.count("| Llama, 0.3M | ") == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
async def test_the_gpu_computes_what_the_cpu_computes(tmp_path: Path) -> None:
    table = await compare(CALC, Setup("cuda", tmp_path, tmp_path))
    assert len(table.rows) == 2 * len(BOUNDS)
    assert table.beyond == []
