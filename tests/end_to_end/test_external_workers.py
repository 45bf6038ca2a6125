"""`agl train` with workers apart: they come, are killed, fall asleep and wake, and training only takes longer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agl_core.store.sqlite import SqliteStore
from agl_core.types import Attempt, Ending, RolloutState

CALC = Path(__file__).parents[2] / "examples" / "calc"

SLOW_AGENT = """
import os, time
import httpx

def solve(task_input):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = {"model": "m", "messages": [{"role": "user", "content": task_input["question"]}]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False).raise_for_status().json()
    time.sleep(0.5)
    return answer["choices"][0]["message"]["content"]
"""

SETTINGS = {
    "train.steps": 3, "train.groups_per_step": 2, "train.group_size": 6, "train.checkpoint_every": 10,
    "eval.tasks": 2, "eval.every": 10, "eval.modes": ["eval-greedy"], "sampling.max_tokens": 8,
    "workers.embedded": False, "workers.attempts": 5, "server.lease": 2.0,
}  # fmt: skip


def all_attempts(store: Path) -> list[Attempt]:
    """Every attempt of a run, after checking that each rollout is done by one of its attempts."""

    async def read() -> list[Attempt]:
        found = []
        async with SqliteStore(store, read_only=True) as opened:
            for rollout in await opened.rollouts(run="calc"):
                attempts = await opened.attempts(rollout.id)
                assert rollout.state is RolloutState.DONE
                assert rollout.ending is Ending.FINISHED
                assert [each.attempt for each in attempts if each.attempt == rollout.counted_attempt] != []
                found += attempts
        return found

    return asyncio.run(read())


def held_by(store: Path, pid: int) -> int:
    """Attempts that the worker with this process id runs now."""

    async def read() -> int:
        async with SqliteStore(store, read_only=True) as opened:
            running = await opened.rollouts(run="calc", state=RolloutState.RUNNING)
            attempts = [(await opened.attempts(each.id))[-1] for each in running]
            return sum(f":{pid}:" in each.worker for each in attempts)

    return asyncio.run(read())


def stopped_at_work(store: Path, pid: int) -> bool:
    """Stop a worker that runs something; whether it is stopped, with attempts that it cannot report."""
    if not held_by(store, pid):
        return False
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.3)  # What it had reported by then is written.
    if held_by(store, pid):
        return True
    os.kill(pid, signal.SIGCONT)
    return False


def slow_run(agl: Any, **changes: Any) -> list[str]:
    """The arguments to train a slow, sync agent without a worker; the configuration is slow.toml."""
    (agl.folder / "slow_agent.py").write_text(SLOW_AGENT)
    config = (CALC / "train.toml").read_text()
    config = config.replace('"agent:solve"', '"slow_agent:solve"').replace('"tasks.py"', f'"{CALC / "tasks.py"}"')
    (agl.folder / "slow.toml").write_text(config.replace('"policy"', f'"{CALC / "policy"}"'))
    return ["slow.toml", *(f"--set={key}={json.dumps(value)}" for key, value in {**SETTINGS, **changes}.items())]


@pytest.mark.timing
@pytest.mark.storm
def test_workers_that_are_killed_or_sleep_only_cost_time(agl: Any) -> None:
    arguments = slow_run(agl, **{"server.lease": 4.0})
    workers = [agl.start("worker", "slow.toml", "--concurrency=4") for _ in range(2)]
    training = agl.start("train", *arguments)
    run, store = agl.folder / "runs" / "calc", agl.folder / "runs" / "calc" / "store.sqlite"

    killed, asleep = workers
    training.until(lambda: "step   1/3" in training.output())
    training.until(lambda: stopped_at_work(store, killed.process.pid))
    killed.kill()
    lost = agl.start("worker", str(run), "--concurrency=4")
    training.until(lambda: stopped_at_work(store, asleep.process.pid))
    training.until(lambda: held_by(store, asleep.process.pid) == 0)
    os.kill(asleep.process.pid, signal.SIGCONT)

    assert training.wait() == 0, training.output()
    assert agl.summary("calc")["steps"] == 3
    attempts = all_attempts(store)
    endings = Counter(each.ending for each in attempts)
    assert endings[Ending.FINISHED] == 1 + 3 * 12 + 2 * 2 * 2  # the first look; two held-out sets, before and after
    assert set(endings) == {Ending.FINISHED, Ending.LOST}
    was_lost = {each.worker.split(":")[1] for each in attempts if each.ending is Ending.LOST}
    assert was_lost == {str(killed.process.pid), str(asleep.process.pid)}
    assert "agl worker" in training.output()
    for worker in (asleep, lost):
        assert worker.wait(60) == 0, worker.output()
        assert "0 running" in worker.output()


@pytest.mark.storm
def test_a_worker_follows_a_run_that_is_killed_and_resumed(agl: Any) -> None:
    arguments = slow_run(agl, **{"train.steps": 2, "train.checkpoint_every": 1})
    worker = agl.start("worker", "slow.toml", "--concurrency=4")
    training = agl.start("train", *arguments)
    run = agl.folder / "runs" / "calc"
    training.until(lambda: "step   1/2" in training.output())
    training.until(lambda: held_by(run / "store.sqlite", worker.process.pid) > 0)
    training.kill()
    first = json.loads((run / "server.json").read_text())["base_url"]
    worker.until(lambda: "cannot be reached" in worker.output())
    agl.run("train", "--resume", str(run))
    second = json.loads((run / "server.json").read_text())["base_url"]

    assert agl.summary("calc")["steps"] == 2
    assert worker.wait(60) == 0, worker.output()
    assert f"working for {first}" in worker.output()
    assert f"working for {second}" in worker.output()
    assert worker.output().count("cannot be reached") == 1
