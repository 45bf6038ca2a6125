"""`agl plot`: a picture of runs, with a band over their seeds."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import orjson
import pytest

from agl_core.testing.fixtures import Agl, agl_in_process  # noqa: F401

BEGINNINGS = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}


def made(folder: Path, name: str, seed: int, rewards: tuple[float, ...], credit: str = "identical") -> None:
    run = folder / "runs" / name
    run.mkdir(parents=True)
    own = f'name = "{name}"\nseed = {seed}\nfolder = "../of {name}"\n'
    (run / "config.toml").write_text(f'{own}[credit]\nname = "{credit}"\n')
    lines = [{"step": at, "kind": "train", "restart": 0, "reward/mean": value} for at, value in enumerate(rewards, 1)]
    lines += [{"step": 2, "kind": "eval", "restart": 0, "held/greedy/reward/mean": rewards[-1]}]
    (run / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_seeds_are_one_line_with_a_band(working_folder: Path, agl: Agl, kind: str) -> None:
    made(working_folder, "a", 0, (0.1, 0.5))
    made(working_folder, "a-2", 1, (0.2, 0.7))
    made(working_folder, "b", 0, (0.3, 0.4), "discounted")

    done = agl("plot", "a", "a-2", "b", "--out", f"curves.{kind}")

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"curves.{kind}: a (2 seeds); b (1 seed)\n"
    assert (working_folder / f"curves.{kind}").read_bytes().startswith(BEGINNINGS[kind])


def test_seeds_are_named_by_what_their_names_have_in_common(working_folder: Path, agl: Agl) -> None:
    for seed in range(2):
        made(working_folder, f"sums-seed-{seed}", seed, (0.1, 0.5))
        made(working_folder, f"{seed}", seed, (0.1, 0.5), "stepwise")
    made(working_folder / "elsewhere", "sums-seed", 0, (0.1, 0.5), "air")

    done = agl("plot", "sums-seed-0", "0", "sums-seed-1", "elsewhere/runs/sums-seed", "1")

    assert done.stdout.split(": ")[1] == "sums-seed (2 seeds); 0 (2 seeds); elsewhere/runs/sums-seed (1 seed)\n"


def test_a_band_is_drawn_for_several_seeds_only(working_folder: Path, agl: Agl) -> None:
    made(working_folder, "a", 0, (0.1, 0.5))
    made(working_folder, "a-2", 1, (0.2, 0.7))

    bands = []
    for runs in (["a"], ["a", "a-2"]):
        assert agl("plot", *runs).returncode == 0
        picture = ET.parse(working_folder / "curves.svg").getroot()
        bands.append(sum("FillBetween" in each.get("id", "") for each in picture.iter()))

    assert bands == [0, 2]


def test_what_cannot_be_drawn_is_named(working_folder: Path, agl: Agl, monkeypatch: pytest.MonkeyPatch) -> None:
    made(working_folder, "a", 0, (0.1, 0.5))
    (working_folder / "runs" / "new").mkdir()
    (working_folder / "runs" / "new" / "config.toml").write_text("seed = 1\n")

    assert "end in .svg or .png or .pdf" in agl("plot", "a", "--out", "curves.gif").stderr
    assert "runs/new has no curves" in agl("plot", "new").stderr
    assert "nope is not a run's folder" in agl("plot", "nope").stderr
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    missing = agl("plot", "a")
    assert missing.returncode == 2
    assert "pip install 'agl-core[plot]'" in missing.stderr
    assert not (working_folder / "curves.svg").exists()
