"""The kit itself: what it leaves out, writes and notices; on a GPU, whether that computes what the CPU computes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from . import __main__ as kit
from .__main__ import BOUNDS, CALC, Setup, Table, compare, parity_table, three_steps, torch_engine

ROOT = Path(__file__).parents[2]
NO_FIGURES = "No figures yet: run `make gpu` on a machine with a CUDA GPU."


def broken(setup: Setup, seconds: float) -> Table:
    raise ValueError("no such luck\nand more")


def slow(setup: Setup, seconds: float) -> Table:
    raise TimeoutError


def whole(setup: Setup, seconds: float) -> Table:
    return Table(("one", "two"), [("1", "2")])


def far(setup: Setup, seconds: float) -> Table:
    return Table(("one",), [("1",)], ["It is too far."])


def killed(setup: Setup, seconds: float) -> Table:
    raise KeyboardInterrupt


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Runs the kit with these parts; its page is then returned."""
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{kit.BEGIN}\n\n{NO_FIGURES}\n\n{kit.END}\nafter\n")
    monkeypatch.setattr(kit, "PAGE", page)
    monkeypatch.setattr(kit, "machine", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def run_parts(*parts: Callable[[Setup, float], Table], status: int = 0, options: str = "") -> str:
        named = {part.__name__: kit.Part(f"The {part.__name__}", part, ("json",)) for part in parts}
        monkeypatch.setattr(kit, "PARTS", named)
        monkeypatch.setattr(sys, "argv", ["gpu", *options.split()])
        assert kit.main() == status
        return page.read_text()

    return run_parts


def test_a_part_that_fails_stops_no_other_and_each_is_on_the_page(run: Callable[..., str]) -> None:
    page = run(broken, slow, far, whole, status=1)
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "### The broken\n\nMeasured on: a GPU.\n\n**It failed: ValueError: no such luck**\n" in page
    assert "the time was over" in page
    assert "**It is too far.**" in page
    assert "| one | two |\n| --- | --- |\n| 1 | 2 |\n" in page
    assert NO_FIGURES not in page


def test_a_part_that_is_killed_leaves_the_figures_of_those_before(run: Callable[..., str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(whole, killed)
    assert "| 1 | 2 |" in kit.PAGE.read_text()


def test_a_stand_in_never_writes_the_page(run: Callable[..., str]) -> None:
    assert NO_FIGURES in run(whole, options="--device cpu")


def test_without_a_gpu_it_says_so_and_runs_nothing(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"no CUDA GPU: torch .* finds none.*--device cpu"):
        run(killed)


def test_missing_libraries_are_called_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        kit.importlib.util, "find_spec", lambda name: None if name in ("verl", "ray", "vllm") else find_spec(name)
    )
    absent = kit.missing(kit.PARTS["verl_steps"].needs)
    assert [name for name in absent if name in ("veRL", "Ray", "vLLM")] == ["veRL", "Ray", "vLLM"]


def test_the_page_has_figures_of_a_gpu_or_says_that_it_has_none() -> None:
    text = kit.PAGE.read_text(encoding="utf-8")
    figures = text.split(kit.BEGIN)[1].split(kit.END)[0].strip()
    measured = [line for line in figures.splitlines() if line.startswith("Measured on: ")]
    assert figures == NO_FIGURES or (measured and all(", CUDA " in line for line in measured))


def test_the_kit_is_found_where_another_package_is_called_tests(tmp_path: Path) -> None:
    """veRL's wheel installs one."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = "import importlib.util; print(importlib.util.find_spec('tests.gpu.__main__').origin)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == kit.__file__, done.stderr


def test_a_parity_case_that_is_too_far_or_was_not_run_is_said() -> None:
    near = {"advantages": 0.0, "loss": 1e-7, "cosine": 1.0, "norm": 1e-7, "within": True}
    table = parity_table({"GRPO": near, "PPO": "flash-attn is not installed", "other": {**near, "within": False}})
    assert [row[0] for row in table.rows] == ["GRPO", "PPO", "other"]
    assert table.rows[1][1] == "not run: flash-attn is not installed"
    assert [sentence.split(":")[0] for sentence in table.beyond] == ["other"]


@pytest.mark.storm
def test_the_parts_of_the_torch_engine_play_on_a_cpu() -> None:
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("| calc policy, 0.9M | cpu, ") == len(BOUNDS)
    assert done.stdout.count("| LoRA |") == 2


@pytest.mark.storm
async def test_three_steps_with_a_restart(tmp_path: Path) -> None:
    """What is asked of the veRL engine, asked of the torch engine."""
    table = await three_steps(torch_engine("cpu"), Setup("cpu", tmp_path), "float32", (8, 24))
    assert [row[0] for row in table.rows] == ["1", "2", "3, resumed"]
    assert table.beyond == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
async def test_the_gpu_computes_what_the_cpu_computes(tmp_path: Path) -> None:
    table = await compare(CALC, Setup("cuda", tmp_path))
    assert len(table.rows) == 2 * len(BOUNDS)
    assert table.beyond == []
