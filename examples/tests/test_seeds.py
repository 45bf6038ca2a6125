"""The script that trains an example once per seed: what it runs, what it keeps, what it shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import seeds

AGL = f"""#!{sys.executable}
import json, pathlib, sys
settings = dict(given.split("=", 1) for given in sys.argv[1:] if "=" in given)
with open("commands", "a") as commands:
    commands.write(" ".join(sys.argv[1:]) + "\\n")
seed = int(settings["seed"])
if pathlib.Path("broken").exists():
    sys.exit(1)
folder = pathlib.Path(settings["runs"]) / settings["name"]
while folder.exists():
    folder = folder.with_name(folder.name + "-2")
folder.mkdir(parents=True)
after = 0.9 + seed / 100
summary = {{
    "rewards": {{
        "eval": {{"before": {{"greedy": 0.0, "sampled": 0.05}}, "after": {{"greedy": after, "sampled": 0.9}}}},
    }},
    "transitions": {{"kept": 20}}, "seconds": 100 + seed, "peak_rss_bytes": 1,
    "rollouts": {{"finished": 7, "crashed": 1}}, "llm_calls": 20,
    "evaluations": [
        {{"set": "eval", "mode": mode, "step": step, "reward": 0.4 * step}}
        for step in (0, 2) for mode in ("greedy", "sampled")
    ],
    "train_rewards": [0.1, 0.5], "seed": seed, "checkpoint": None,
}}
(folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An example's folder, and a stand-in for `agl train`, which notes its arguments and writes a summary."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "agl").write_text(AGL)
    (tmp_path / "bin" / "agl").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sum" / "policy").mkdir(parents=True)
    (tmp_path / "sum" / "train.toml").write_text('name = "sum"  # a comment\n')
    (tmp_path / "sum" / "policy" / "weights").write_text("1")
    return Path("sum")


def run(example: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(sys, "argv", ["seeds.py", str(example), "--seeds", str(count)])
    seeds.main()


def commands() -> list[str]:
    return Path("commands").read_text().splitlines()


def test_each_seed_is_a_plain_run_and_the_table_has_all(
    example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(example, monkeypatch, 2)
    settings = [f"--set seed={seed} --set runs=runs --set name=sum-seed-{seed}" for seed in (0, 1)]
    assert commands() == [f"train sum/train.toml {s}" for s in settings]
    assert capsys.readouterr().out.splitlines() == [
        "| seed | `eval`, greedy | `eval`, sampled | seconds | rollouts |",
        "|---|---|---|---|---|",
        "| 0 | 0.000 → 0.900 | 0.050 → 0.900 | 100 | 8 |",
        "| 1 | 0.000 → 0.910 | 0.050 → 0.900 | 101 | 8 |",
        "| mean | 0.000 → 0.905 | 0.050 → 0.900 | 100 | 8 |",
    ]
    assert (example / "curves.svg").read_text().startswith("<svg")


def test_only_what_is_missing_or_out_of_date_is_run(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(example, monkeypatch, 1)
    run(example, monkeypatch, 2)
    assert len(commands()) == 2
    (example / "train.toml").write_text('name = "sum"  # another comment\n')
    run(example, monkeypatch, 2)
    assert len(commands()) == 2
    (example / "tasks.py").write_text("TERMS = 2\n")
    run(example, monkeypatch, 2)
    assert len(commands()) == 4
    (example / "tasks.py").write_text('"""Sums."""\n\nTERMS = 2  # at most\n')
    run(example, monkeypatch, 2)
    assert len(commands()) == 4
    (example / "policy" / "weights").write_text("2")
    run(example, monkeypatch, 2)
    assert len(commands()) == 6
