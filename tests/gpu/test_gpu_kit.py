"""The kit itself, where there is no GPU: what it leaves out, what it writes where, and what it notices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from agl_torch.engine import TorchEngine
from agl_torch.options import TorchOptions

from . import __main__, page, parts, verl_parity
from .agreement import BOUNDS
from .engines import Replies, spec_of
from .models import CALC
from .parts import Part, Played, Setup, Table
from .steps import LORA, RATE, three_steps

HERE = parts.__package__ or ""
ROOT = Path(__file__).parents[2]
TABLE = Table(("one", "two"), [("1", "2")])


def broken(setup: Setup, seconds: float) -> Table:
    raise ValueError("no such luck\nand more")


def slow(setup: Setup, seconds: float) -> Table:
    raise TimeoutError


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Part]:
    """A part of a function."""

    def made(title: str, measure: Callable[[Setup, float], Table], **changes: object) -> Part:
        monkeypatch.setitem(sys.modules, f"{HERE}.{title}", SimpleNamespace(measure=measure))  # type: ignore[arg-type]
        return Part(**{"title": title, "module": title, "needs": ("json",), **changes})  # type: ignore[arg-type]

    return made


def test_every_part_is_run_or_says_by_name_why_it_was_not(part: Callable[..., Part]) -> None:
    chosen = [
        part("broken", broken),
        part("slow", slow),
        part("absent", broken, needs=("json", "verl_of_nowhere")),
        part("whole", lambda setup, seconds: TABLE),
    ]
    said: list[str] = []
    played = parts.play(chosen, "cpu", 60, said.append)
    assert [each.failed for each in played] == [True, True, False, False]
    assert [each.table for each in played] == [None, None, None, TABLE]
    assert played[0].remark == "**It failed: ValueError: no such luck**"
    assert "the time was over" in played[1].remark
    assert played[2].remark == "Not run: verl_of_nowhere is not installed."
    assert "| one | two |\n| --- | --- |\n| 1 | 2 |\n" in said[-1]


def test_nothing_begins_when_the_time_is_over(part: Callable[..., Part]) -> None:
    [played] = parts.play([part("whole", lambda setup, seconds: TABLE)], "cpu", 0, lambda _: None)
    assert played.remark == "Not run: the time was over."


def test_what_is_missing_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    there = parts.importlib.util.find_spec
    absent = ("verl", "ray", "vllm")
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda name: None if name in absent else there(name))
    by_title = {each.module: parts.missing(each.needs) for each in parts.PARTS}
    assert by_title["agreement"] is None
    assert by_title["speed"] is None
    assert by_title["verl_parity"] is not None
    assert by_title["verl_parity"].startswith("veRL")
    assert by_title["verl_steps"] is not None
    assert by_title["verl_steps"].endswith("vLLM are not installed")


def test_a_measured_table_that_is_beyond_its_bounds_has_failed(part: Callable[..., Part]) -> None:
    beyond = Table(("one",), [("1",)], ["It is too far."])
    [played] = parts.play([part("far", lambda setup, seconds: beyond)], "cpu", 60, lambda _: None)
    assert played.failed
    assert "**It is too far.**" in played.markdown


def test_the_page_has_figures_of_a_gpu_or_says_that_it_has_none() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    figures = text.split(page.BEGIN)[1].split(page.END)[0].strip()
    measured = [line for line in figures.splitlines() if line.startswith("Measured on: ")]
    assert figures == page.NO_FIGURES or (measured and all(", CUDA " in line for line in measured))


def test_new_figures_take_the_place_of_those_before_and_leave_other_parts_as_they_are() -> None:
    text = f"before\n{page.BEGIN}\n\n{page.NO_FIGURES}\n\n{page.END}\nafter\n"
    second, first = (Played(each, TABLE, "It took 1 s.") for each in (parts.PARTS[1], parts.PARTS[0]))
    once = page.written(text, "a GPU", second)
    assert page.NO_FIGURES not in once
    assert (once.startswith("before\n"), once.endswith("after\n")) == (True, True)
    assert page.written(once, "a GPU", second) == once
    twice = page.written(once, "another GPU", first)
    assert twice.index(f"### {first.part.title}") < twice.index(f"### {second.part.title}"), "in the kit's order"
    assert (twice.count("Measured on: a GPU."), twice.count("Measured on: another GPU.")) == (1, 1)
    again = page.written(twice, "a third", second)
    assert (again.count("Measured on: a GPU."), again.count("Measured on: a third.")) == (0, 1)


def test_every_part_is_kept_when_it_ends(part: Callable[..., Part]) -> None:
    kept: list[str] = []

    def killed(setup: Setup, seconds: float) -> Table:
        assert kept == ["whole"]
        raise KeyboardInterrupt

    chosen = [part("whole", lambda setup, seconds: TABLE), part("killed", killed)]
    with pytest.raises(KeyboardInterrupt):
        parts.play(chosen, "cpu", 60, lambda _: None, lambda played: kept.append(played.part.title))
    assert kept == ["whole"]


def test_a_part_that_was_not_run_leaves_its_figures(a_page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__main__, "machine", lambda device: "a GPU, CUDA 13.0")
    __main__.write(Played(parts.PARTS[0], TABLE, "It took 1 s."))
    measured = a_page.read_text()
    __main__.write(Played(parts.PARTS[0], None, "Not run: the time was over."))
    assert a_page.read_text() == measured
    __main__.write(Played(parts.PARTS[0], None, "**It failed**", failed=True))
    assert "**It failed**" in a_page.read_text()


@pytest.fixture
def a_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The kit's page, and no parts."""
    where = tmp_path / "gpu.md"
    where.write_text(page.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(__main__, "PAGE", where)
    monkeypatch.setattr(__main__, "PARTS", ())
    return where


def test_a_stand_in_never_writes_the_page(a_page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = a_page.read_text()
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu"])
    assert __main__.main() == 0
    assert a_page.read_text() == before


def test_without_a_gpu_it_says_so_and_runs_nothing(a_page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = a_page.read_text()
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setattr(__main__, "missing_gpu", lambda: "no CUDA GPU: torch 9 finds none")
    with pytest.raises(SystemExit, match=r"no CUDA GPU: torch 9 finds none.*--device cpu"):
        __main__.main()
    assert a_page.read_text() == before


def test_the_kit_is_found_where_another_package_is_called_tests(tmp_path: Path) -> None:
    """veRL's wheel installs one."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "tests.gpu", "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "--minutes" in done.stdout, done.stderr


def test_a_gpu_that_computes_something_else_is_noticed() -> None:
    bounds = BOUNDS["float32"]
    assert bounds.beyond(gap=1e-6, served=1e-6, cosine=1.0) == []
    assert "from the CPU's" in bounds.beyond(gap=1e-3, served=1e-6, cosine=1.0)[0]
    assert "that were served" in bounds.beyond(gap=1e-6, served=1e-3, cosine=1.0)[0]
    assert "cosine" in bounds.beyond(gap=1e-6, served=1e-6, cosine=0.9)[0]
    assert len(bounds.beyond(gap=float("nan"), served=float("nan"), cosine=float("nan"))) == 3


def test_a_parity_case_that_is_too_far_or_was_not_run_is_said() -> None:
    near = {"advantages": 0.0, "loss": 1e-7, "cosine": 1.0, "norm": 1e-7, "within": True}
    made = verl_parity.table({"GRPO": near, "PPO": "flash-attn is not installed", "other": {**near, "within": False}})
    assert [row[0] for row in made.rows] == ["GRPO", "PPO", "other"]
    assert made.rows[1][1] == "not run: flash-attn is not installed"
    assert [each.split(":")[0] for each in made.beyond] == ["other"]


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
    options = TorchOptions(device="cpu", threads=1)
    spec = spec_of(CALC.folder(tmp_path), "float32", LORA, RATE)
    made = await three_steps(
        lambda context: TorchEngine(options, context), Setup("cpu", tmp_path), spec, Replies(8, 24)
    )
    assert [row[0] for row in made.rows] == ["1", "2", "3, resumed"]
    assert made.beyond == []
