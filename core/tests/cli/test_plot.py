"""`agl plot`: a picture of runs, with a band over their seeds."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import orjson
import pytest

BEGINNINGS = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}


def made(folder: Path, name: str, seed: int, rewards: tuple[float, ...], credit: str = "identical") -> None:
    run = folder / "runs" / name
    run.mkdir(parents=True)
    (run / "config.toml").write_text(f'name = "{name}"\nseed = {seed}\n[credit]\nname = "{credit}"\n')
    lines = [{"step": at, "kind": "train", "restart": 0, "reward/mean": value} for at, value in enumerate(rewards, 1)]
    lines += [{"step": 2, "kind": "eval", "restart": 0, "held/greedy/reward/mean": rewards[-1]}]
    (run / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def plot(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from agl_core.cli import main; main()", "plot", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_seeds_are_one_line_with_a_band(tmp_path: Path, kind: str) -> None:
    made(tmp_path, "a", 0, (0.1, 0.5))
    made(tmp_path, "a-2", 1, (0.2, 0.7))
    made(tmp_path, "b", 0, (0.3, 0.4), "discounted")

    done = plot(tmp_path, "a", "a-2", "b", "--out", f"curves.{kind}")

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"curves.{kind}: a (2 seeds); b (1 seeds)\n"
    assert (tmp_path / f"curves.{kind}").read_bytes().startswith(BEGINNINGS[kind])


def test_a_band_is_drawn_for_several_seeds_only(tmp_path: Path) -> None:
    made(tmp_path, "a", 0, (0.1, 0.5))
    made(tmp_path, "a-2", 1, (0.2, 0.7))

    bands = []
    for runs in (["a"], ["a", "a-2"]):
        assert plot(tmp_path, *runs).returncode == 0
        picture = ET.parse(tmp_path / "curves.svg").getroot()
        bands.append(sum("FillBetween" in each.get("id", "") for each in picture.iter()))

    assert bands == [0, 2]


def test_what_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    made(tmp_path, "a", 0, (0.1, 0.5))
    (tmp_path / "runs" / "new").mkdir()
    (tmp_path / "runs" / "new" / "config.toml").write_text("seed = 1\n")
    (tmp_path / "hidden" / "matplotlib").mkdir(parents=True)
    (tmp_path / "hidden" / "matplotlib" / "__init__.py").write_text("raise ImportError")

    assert "end in .svg or .png or .pdf" in plot(tmp_path, "a", "--out", "curves.gif").stderr
    assert "runs/new has no curves" in plot(tmp_path, "new").stderr
    assert "nope is not a run's folder" in plot(tmp_path, "nope").stderr
    missing = plot(tmp_path, "a", PYTHONPATH=str(tmp_path / "hidden"))
    assert missing.returncode == 2
    assert "pip install 'agl-core[plot]'" in missing.stderr
    assert not (tmp_path / "curves.svg").exists()
