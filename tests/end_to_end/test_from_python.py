"""Training from a script: `agl_server.train`, with a file, with a mapping, and in a running loop as in a notebook."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from testing_aids import run_python

CALC = Path(__file__).parents[2] / "examples" / "calc" / "train.toml"
TRAIN = """
import asyncio, json, tomllib, agl_server
short = {"train.steps": 1, "train.groups_per_step": 2, "eval.every": 0, "runs": "runs"}
first = agl_server.train(CONFIG, **short)
mapping = {**tomllib.load(open(CONFIG, "rb")), "name": "mapped", "folder": FOLDER}
second = asyncio.run(agl_server.train_async(mapping, **short))
for run in (first, second):
    sampled = run.transitions(mode="train")
    agents = sampled["agent"].unique().tolist()
    print(json.dumps([run.folder.name, len(run.metrics()), len(run.rollouts(mode="train")), agents]))
"""


@pytest.mark.storm
def test_a_script_trains_and_reads_its_runs(tmp_path: Path) -> None:
    code = f"CONFIG, FOLDER = {str(CALC)!r}, {str(CALC.parent)!r}\n{TRAIN}"
    first, second = (json.loads(line) for line in run_python(code, tmp_path).splitlines() if line.startswith("["))
    assert (first[0], second[0]) == ("calc", "mapped")
    assert first[1:] == second[1:] == [1, 2 * 8, ["solver"]]
