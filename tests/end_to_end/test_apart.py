"""Server, trainer and workers as processes of their own: `agl serve`, `agl train --server`, `agl worker --server`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agl_core.store.sqlite import SqliteStore
from agl_core.types import AttemptKey, Ending, Run, TrainingRecord

from .test_external_workers import all_attempts, held_by, slow_run

STEPS = 3
ROLLOUTS = 1 + STEPS * 12 + 2 * 2 * 2
"""The first look, those of training, and of two held-out sets before and after."""


def url_of(serving: Any) -> str:
    """Where a server says that it listens."""
    serving.until(lambda: "work: " in serving.output())
    found = re.search(r"^serving \S+ at (\S+)$", serving.output(), re.MULTILINE)
    assert found is not None
    return found[1]


def recorded(store: Path) -> tuple[list[Run], list[TrainingRecord], Counter[str]]:
    """The runs, the uses of every rollout, and how many calls each attempt recorded under one id."""

    async def read() -> tuple[list[Run], list[TrainingRecord], Counter[str]]:
        async with SqliteStore(store, read_only=True) as opened:
            rollouts = await opened.rollouts(run="calc")
            keys = [AttemptKey(each.id, each.counted_attempt or 0) for each in rollouts]
            calls = Counter(f"{call.rollout}/{call.attempt}/{call.id}" for call in await opened.calls(keys))
            return await opened.runs(), await opened.training_records(keys), calls

    return asyncio.run(read())


@pytest.mark.storm
def test_server_trainer_and_two_workers_apart(agl: Any) -> None:
    config, *settings = slow_run(agl, **{"server.lease": 20.0})
    serving = agl.start("serve", config, *settings)
    url = url_of(serving)
    workers = [agl.start("worker", config, "--concurrency=6", *where) for where in ([f"--server={url}"], [])]
    serving.until(lambda: all("working for" in worker.output() for worker in workers))
    training = agl.start("train", config, f"--server={url}", *settings)

    assert training.wait() == 0, training.output()
    for worker in workers:
        assert worker.wait(60) == 0, worker.output()
        assert "0 running" in worker.output()
    serving.process.send_signal(signal.SIGTERM)
    assert serving.wait(60) == 0, serving.output()

    run = agl.folder / "runs" / "calc"
    assert [each.name for each in (agl.folder / "runs").iterdir()] == ["calc"], "one folder, since it is one machine"
    assert agl.summary("calc")["steps"] == STEPS
    attempts = all_attempts(run / "store.sqlite")
    assert Counter(each.ending for each in attempts) == {Ending.FINISHED: ROLLOUTS}
    assert len({each.worker for each in attempts}) == 2, "both workers had some"
    runs, training_records, calls = recorded(run / "store.sqlite")
    assert [(each.id, each.restart) for each in runs] == [("calc", 0)]
    used = agl.summary("calc")["transitions"]
    assert len(training_records) == used["kept"] + sum(used["dropped"].values())
    assert {record.step for record in training_records} == {1, 2, 3}
    assert set(calls.values()) == {1}


@pytest.mark.storm
def test_a_server_that_is_killed_and_started_again_only_costs_time(agl: Any) -> None:
    config, *settings = slow_run(agl)
    store = agl.folder / "runs" / "calc" / "store.sqlite"
    serving = agl.start("serve", config, *settings)
    url = url_of(serving)
    workers = [agl.start("worker", config, f"--server={url}", "--concurrency=6") for _ in range(2)]
    training = agl.start("train", config, f"--server={url}", *settings)
    training.until(lambda: "step   1/3  reward" in training.output())
    training.until(lambda: sum(held_by(store, worker.process.pid) for worker in workers) > 4)
    os.kill(serving.process.pid, signal.SIGKILL)
    serving.process.wait(30)
    training.until(lambda: "cannot be reached" in training.output())
    assert training.process.poll() is None
    again = agl.start("serve", config, *settings)
    assert url_of(again) == url, "it listens where the killed one did"

    assert training.wait() == 0, training.output()
    for worker in workers:
        assert worker.wait(60) == 0, worker.output()
    again.process.send_signal(signal.SIGINT)
    assert again.wait(60) == 0, again.output()
    assert agl.summary("calc")["steps"] == STEPS
    assert training.output().count("cannot be reached") == 1
    attempts = all_attempts(store)
    counted = Counter(each.ending for each in attempts)
    assert counted[Ending.FINISHED] == ROLLOUTS, "each rollout ended once, and well"
    assert set(counted) <= {Ending.FINISHED, Ending.LOST}
    runs, training_records, calls = recorded(store)
    assert [each.restart for each in runs] == [0], "the trainer never stopped"
    assert len({record.key for record in training_records}) == len(training_records)
    per_step = Counter(record.step for record in training_records)
    assert per_step.keys() == {1, 2, 3}
    assert all(found == 1 for found in calls.values())


@pytest.mark.storm
def test_a_trainer_that_is_killed_is_resumed_and_workers_wait_meanwhile(agl: Any) -> None:
    small = {"train.steps": 2, "train.groups_per_step": 1, "eval.tasks": 1, "train.checkpoint_every": 1}
    config, *settings = slow_run(agl, **small)
    run = agl.folder / "runs" / "calc"
    serving = agl.start("serve", config, *settings)
    url = url_of(serving)
    worker = agl.start("worker", config, f"--server={url}", "--concurrency=6")
    training = agl.start("train", config, f"--server={url}", *settings)
    training.until(lambda: "step   1/2  reward" in training.output())
    training.until(lambda: held_by(run / "store.sqlite", worker.process.pid) > 0)
    training.kill()
    serving.until(lambda: "was not heard of" in serving.output())
    assert worker.process.poll() is None
    agl.run("train", "--resume", run, f"--server={url}")

    assert agl.summary("calc")["steps"] == 2
    assert worker.wait(60) == 0, worker.output()
    runs, training_records, _ = recorded(run / "store.sqlite")
    assert [(each.restart, each.resumed_step) for each in runs] == [(0, None), (1, 1)]
    assert {record.step for record in training_records} >= {1, 2}
    refused = agl.start("train", config, f"--server={url}", *settings)
    assert refused.wait(60) == 2
    assert "has been trained already" in refused.output()
    assert "agl train --resume" in refused.output()
    assert json.loads((run / "server.json").read_text())["base_url"] == url
