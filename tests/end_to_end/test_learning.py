"""A deployed policy gets better from use: real users' clients, real processes, and each of them is killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agl_core.store.sqlite import SqliteStore
from agl_core.types import AttemptKey, Mode, RolloutState

from .conftest import CALC, Agl, Command

SETTINGS = """
[rewards.users]
rule = "feedback"
modes = ["use"]

[online.applications]
calc = 1

[learn]
sessions_per_step = 32
offline_share = 0.2
propose_every = 4

[learn.canary]
share = 0.5
tolerance = 0.3
"""


def configuration(folder: Path) -> Path:
    """The calc example, deployed."""
    text = re.sub(r"^name = .*$", f'name = "online"\nfolder = "{CALC.parent}"', CALC.read_text(), flags=re.M, count=1)
    text = text.replace('plugins = ["tasks.py"]', f'plugins = ["{CALC.parent / "tasks.py"}"]')
    text = re.sub(r"\[tasks.eval_templates\].*?\n\n", "", text, flags=re.S)
    file = folder / "online.toml"
    file.write_text(text + SETTINGS)
    return file


LEARN = [
    "train.steps=400", "train.group_size=4", "train.checkpoint_every=2", "eval.every=0", "eval.tasks=30",
    "algorithm.name=reinforce++", "algorithm.reinforce++.importance_cap=2",
    "policies.default.optimizer.schedule=constant",
]  # fmt: skip


class Deployed:
    """The learner, and users of it."""

    def __init__(self, agl: Agl) -> None:
        self.agl, self.folder = agl, agl.folder
        self.run = agl.folder / "runs" / "online"
        self.file = configuration(agl.folder)
        self.users: subprocess.Popen[bytes] | None = None

    def learn(self) -> Command:
        """Start the command, and tell the users where it is."""
        command = self.agl.start("learn", self.file, *(f"--set={each}" for each in LEARN))
        command.until(lambda: "use: " in command.output())
        [url] = re.findall(r"use: (\S+)/v1", command.output())
        keys = {"key": self.key(), "feedback": self.key("--feedback")}
        (self.folder / "address.json").write_text(json.dumps({"url": url, **keys}))
        if self.users is None:
            arguments = ["-m", "tests.end_to_end.calc_users", self.folder / "address.json", self.folder / "users.log"]
            with (self.folder / "users.txt").open("w") as output:
                environment = {**os.environ, "PYTHONPATH": str(CALC.parent)}
                self.users = subprocess.Popen(
                    [sys.executable, *arguments], stdout=output, stderr=output, env=environment
                )
        return command

    def key(self, *options: str) -> str:
        return self.agl.run("sessions", "key", self.run, "calc", *options).strip()

    @property
    def decisions(self) -> list[dict[str, Any]]:
        file = self.run / "versions.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def became(self, state: str) -> bool:
        return any(each["state"] == state and each["step"] for each in self.decisions)

    @property
    def steps(self) -> int:
        return max((line["step"] for line in self.agl.metrics("online") if line["kind"] == "train"), default=0)

    @property
    def talks(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "users.log").read_text().splitlines()]


@pytest.fixture
def deployed(agl: Agl) -> Iterator[Deployed]:
    made = Deployed(agl)
    yield made
    if made.users is not None:
        made.users.kill()
        made.users.wait()


@pytest.mark.storm
def test_a_policy_that_is_used_gets_better_though_each_of_its_processes_is_killed(deployed: Deployed) -> None:
    first = deployed.learn()
    first.until(lambda: deployed.steps >= 1)
    engines = psutil.Process(first.process.pid).children()
    assert len(engines) == 2, "one trains, and one answers sessions"
    for engine in engines:
        known, steps = len(deployed.talks), deployed.steps
        engine.kill()
        first.until(lambda known=known, steps=steps: len(deployed.talks) >= known + 20 and deployed.steps > steps)
    second = deployed.agl.start("learn", deployed.file, *(f"--set={each}" for each in LEARN))
    assert second.wait() == 2
    assert "Another process has the run" in second.output()
    first.until(lambda: deployed.steps >= 7 and deployed.became("passed"))
    first.kill()

    again = deployed.learn()
    assert deployed.users is not None
    again.until(lambda: deployed.became("stable") and deployed.steps >= 10)
    known = len(deployed.talks)
    again.until(lambda: len(deployed.talks) >= known + 200)
    deployed.users.kill()
    deployed.users.wait()
    again.process.send_signal(signal.SIGINT)
    assert again.wait() == 130, again.output()
    assert "agl learn" in again.output().splitlines()[-1]

    rights = [each["right"] for each in deployed.talks]
    assert sum(rights[-200:]) - sum(rights[:200]) > 20, "users are better served than in the beginning"
    asyncio.run(check_records(deployed))


async def check_records(deployed: Deployed) -> None:
    """Every session that a user finished is there, once, and was trained on in one step at most."""
    async with SqliteStore(deployed.run / "store.sqlite", read_only=True) as store:
        sessions = {each.id: each for each in await store.rollouts(mode=Mode.USE)}
        keys = [AttemptKey(id, 0) for id in sessions]
        said = Counter(each.rollout for each in await store.annotations(keys))
        records = await store.training_records(keys)
    names = Counter(each.task.metadata["session"] for each in sessions.values() if said[each.id])
    for talk in deployed.talks:
        assert names[talk["name"]] == 1
        assert said[talk["session"]] == 1
        assert sessions[talk["session"]].state is RolloutState.DONE
    used: dict[str, set[int]] = {}
    for record in records:
        used.setdefault(record.rollout, set()).add(record.step)
    assert used
    assert all(steps == {sessions[id].step} for id, steps in used.items())
    per_step = Counter(sessions[id].step for id in used if said[id])
    assert all(per_step[step] >= 32 for step in range(1, deployed.steps + 1)), per_step
