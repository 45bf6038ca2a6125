"""`agl plot`: a picture of runs, with a band over their seeds."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import orjson

from agl_core.testing.fixtures import Agl, agl_in_process, working_folder  # noqa: F401

SVG = "{http://www.w3.org/2000/svg}"


def make_run(folder: Path, name: str, seed: int, rewards: tuple[float, ...], credit: str = "identical") -> None:
    run = folder / "runs" / name
    run.mkdir(parents=True)
    own = f'name = "{name}"\nseed = {seed}\nfolder = "../of {name}"\n'
    (run / "config.toml").write_text(f'{own}[credit]\nname = "{credit}"\n')
    lines = [{"step": at, "kind": "train", "restart": 0, "reward/mean": value} for at, value in enumerate(rewards, 1)]
    lines += [{"step": 2, "kind": "eval", "restart": 0, "held/greedy/reward/mean": rewards[-1]}]
    (run / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def test_seeds_are_one_line_with_a_band(working_folder: Path, agl: Agl) -> None:  # noqa: F811
    make_run(working_folder, "a", 0, (0.1, 0.5))
    make_run(working_folder, "a-2", 1, (0.2, 0.7))
    make_run(working_folder, "b", 0, (0.3, 0.4), "discounted")

    done = agl("plot", "a", "a-2", "b")

    assert done.returncode == 0, done.stderr
    assert done.stdout == "curves.svg: a (2 seeds); b (1 seed)\n"
    picture = ET.parse(working_folder / "curves.svg").getroot()
    words = [element.text for element in picture.iter(f"{SVG}text")]
    assert {"held", "a, training", "a, greedy", "b, training", "b, greedy"} <= set(words)
    bands = [element for element in picture.iter(f"{SVG}polygon") if element.get("class") == "band"]
    assert len(bands) == 2, "of the training and of the evaluations of a"


def test_seeds_are_named_by_what_their_names_have_in_common(working_folder: Path, agl: Agl) -> None:  # noqa: F811
    for seed in range(2):
        make_run(working_folder, f"sums-seed-{seed}", seed, (0.1, 0.5))
        make_run(working_folder, f"{seed}", seed, (0.1, 0.5), "stepwise")
    make_run(working_folder / "elsewhere", "sums-seed", 0, (0.1, 0.5), "air")

    done = agl("plot", "sums-seed-0", "0", "sums-seed-1", "elsewhere/runs/sums-seed", "1")

    assert done.stdout.split(": ")[1] == "sums-seed (2 seeds); 0 (2 seeds); elsewhere/runs/sums-seed (1 seed)\n"


def test_what_cannot_be_drawn_is_named(working_folder: Path, agl: Agl) -> None:  # noqa: F811
    make_run(working_folder, "a", 0, (0.1, 0.5))
    (working_folder / "runs" / "new").mkdir()
    (working_folder / "runs" / "new" / "config.toml").write_text("seed = 1\n")

    assert "Let it end in .svg" in agl("plot", "a", "--out", "curves.gif").stderr
    assert "runs/new has no curves" in agl("plot", "new").stderr
    assert "nope is not a run's folder" in agl("plot", "nope").stderr
