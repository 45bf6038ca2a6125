"""The kit itself: what it leaves out and notices; on a GPU, whether that computes what the CPU computes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from .__main__ import Part, play
from .agreement import BOUNDS, compare
from .kit import CALC, Setup, Size, Table, torch_engine
from .speed import steps

ROOT = Path(__file__).parents[2]


async def broken(setup: Setup) -> Table:
    raise ValueError("no such luck\nand more")


async def far(setup: Setup) -> Table:
    return Table(("one", "two"), [("1", "2")], ["It is too far."])


def test_what_fails_is_not_there_or_is_too_far_is_said(tmp_path: Path) -> None:
    def run(part: Part, name: str) -> tuple[str, bool]:
        return play(part, "cpu", tmp_path / name, time.monotonic() + 60)

    assert run(Part("broken", broken), "a") == ("**It failed: ValueError: no such luck**", False)
    assert run(Part("absent", broken, ("no_such_module",)), "b") == (
        "Not run: not installed: no_such_module.",
        True,
    )
    text, good = run(Part("far", far), "c")
    assert text.startswith("| one | two |\n| --- | --- |\n| 1 | 2 |\n\n**It is too far.**")
    assert not good


@pytest.mark.storm
def test_the_parts_of_the_torch_engine_play_on_a_cpu() -> None:
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("| calc policy, 0.9M | cpu, ") == len(BOUNDS)
    assert done.stdout.count("| Llama, 0.3M | ") == 2


@pytest.mark.storm
async def test_steps_of_conversations_with_a_restart(tmp_path: Path) -> None:
    """The questions to the veRL engine, put to the torch engine."""
    setup, starts = Setup("cpu", tmp_path, tmp_path), [[Size(4, 5, 8, 1), Size(4, 20, 8, 1)], [Size(4, 5, 8, 1)]]
    table = await steps(torch_engine("cpu"), setup, CALC, "float32", starts)
    assert [row[1] for row in table.rows] == ["1", "2", "3, resumed"]
    assert table.rows[1][2] == "80 calls of 20 turns in 4 rows"
    assert table.beyond == []


@pytest.mark.timeout(3600)
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="veRL is not installed (make test-verl)")
def test_verls_part_plays_on_a_cpu() -> None:
    parts = ("--part", "vllm", "--part", "verl_steps")
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--minutes", "55", *parts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "ot run: " not in done.stdout
    assert "| 16 of 16 | " in done.stdout
    assert all(f"| {row} | " in done.stdout for row in ("1", "2", "3, resumed"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
async def test_the_gpu_computes_what_the_cpu_computes(tmp_path: Path) -> None:
    table = await compare(CALC, Setup("cuda", tmp_path, tmp_path))
    assert len(table.rows) == 2 * len(BOUNDS)
    assert table.beyond == []
