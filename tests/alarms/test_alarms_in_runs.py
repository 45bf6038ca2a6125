"""Every alarm, seen in a run made for it: a whole training with server, gateway, workers and store.

Only the policy is scripted. It is well for some steps and then falls ill, so what is raised is raised by what was
recorded. `tests/faults/test_stalls.py` has the runs that stall.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from agl_core.config import load
from agl_core.reading.metrics import read_health
from agl_core.training.metrics import Observer
from agl_core.training.run import train
from agl_core.training.server import new_run_dir
from agl_core.types import AlarmName

from .ailing_parts import WELL

HERE = Path(__file__).parent
GIVEN: Mapping[AlarmName, Mapping[str, Any]] = {
    AlarmName.STALE: {"async": {"max_staleness": 1}, "workers": {"concurrency": 32}},
    AlarmName.NO_REWARD: {"rewards": {"silent": {}}},
    AlarmName.NOTHING_TO_TRAIN: {"train": {"agents": ["writer"]}},
    AlarmName.ASSERTED_REWARDS: {"rewards": {}},
    AlarmName.ASSERTED_TOOL_RESULTS: {"rewards": {"right": {}, "tool_results": {}}},
}
"""What the runs of these need beside an ailing policy."""
AT_ONCE = {AlarmName.NO_REWARD, AlarmName.NOTHING_TO_TRAIN, AlarmName.ASSERTED_TOOL_RESULTS}
"""Their cause is in the configuration, so they come with the first step."""


class Said(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def written(folder: Path, name: AlarmName) -> Path:
    """The configuration of a run in which this alarm is raised."""
    tasks = [{"id": each, "input": {"question": f"{each}: how many apples are there?"}} for each in "abcd"]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (folder / "weights").mkdir()
    given = GIVEN.get(name, {})
    config = {
        "config_version": 1,
        "folder": str(HERE),
        "runs": str(folder / "runs"),
        "plugins": [str(HERE / "ailing_parts.py")],
        "agent": {"entry": "ailing_agent:solve", "attach": False},
        "tasks": {"train": {"source": "jsonl", "path": str(folder / "tasks.jsonl")}},
        "policies": {"default": {"model": {"path": str(folder / "weights")}}},
        "eval": {"every": 0},
        "workers": {"concurrency": 8},
        "rewards": {"right": {}},
        "algorithm": {"name": "grpo"},
        "engine": {"name": "ailing", "ailing": {"ailment": name.value}},
        "trackers": {"tensorboard": False},
        **given,
        "train": {"steps": WELL + 6, "groups_per_step": 4, "group_size": 4, "patience": 0, **given.get("train", {})},
    }
    file = folder / "train.toml"
    file.write_text(tomli_w.dumps(config))
    return file


@pytest.mark.storm
@pytest.mark.parametrize("name", [name for name in AlarmName if name is not AlarmName.STALL])
async def test_an_alarm_is_raised_in_a_run_made_for_it(name: AlarmName, tmp_path: Path) -> None:
    loaded = load(written(tmp_path, name))
    run, said = new_run_dir(loaded), Said()
    await train(loaded, run, said)

    raised = [(step, alarm) for step, alarm in read_health(run).alarms if alarm.name == name]
    assert raised, [line for line in said.lines if "alarm" in line]
    step, alarm = raised[0]
    assert (step <= WELL) == (name in AT_ONCE), "it comes with the illness"
    assert alarm.seen
    assert alarm.remedy
    assert f"step {step}: {alarm.text}" in said.lines
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    assert lines[step - 1][f"alarm/{name}"] == 1.0
