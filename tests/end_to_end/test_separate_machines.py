"""The trainer and two workers on machines of their own: network namespaces with an address each."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from testing_aids import read_store

from agl_core.types import Ending, RolloutState
from agl_core.wire import OPERATOR_KEY, WORKER_KEY

from .conftest import CALC, Agl

SETTINGS = {
    "train.steps": 3, "train.groups_per_step": 2, "train.group_size": 6, "train.checkpoint_every": 10,
    "eval.tasks": 2, "eval.every": 10, "eval.modes": ["eval-greedy"],
    "workers.processes": 0, "workers.attempts": 5, "server.host": "0.0.0.0",
}  # fmt: skip
KEY = {WORKER_KEY: "the-workers-key"}
PORT, STEPS = 8123, 3
ROLLOUTS = 1 + STEPS * 12 + 2 * 2 * 2
"""The first look, those of training, and of two held-out sets before and after."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[[str], Agl]]:
    """Makes machines: the trainer, and others, each joined to it by a network: they have 10.77.N.2, it 10.77.N.1."""
    name = f"agl-{secrets.token_hex(3)}"
    try:
        ip("netns", "add", f"{name}-0")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here (they take root and iproute2): {error}")
    with ExitStack() as stack:
        stack.callback(ip, "netns", "delete", f"{name}-0")
        ip("-n", f"{name}-0", "link", "set", "lo", "up")
        machines: list[Agl] = []

        def make(role: str) -> Agl:
            number = len(machines)
            space = f"{name}-{number}"
            if number:
                ip("netns", "add", space)
                stack.callback(ip, "netns", "delete", space)
                link = ("link", "add", f"to{number}", "type", "veth", "peer", "name", "uplink", "netns", space)
                ip("-n", f"{name}-0", *link)
                ip("-n", space, "link", "set", "lo", "up")
                for where, device, address in ((f"{name}-0", f"to{number}", 1), (space, "uplink", 2)):
                    ip("-n", where, "address", "add", f"10.77.{number}.{address}/24", "dev", device)
                    ip("-n", where, "link", "set", device, "up")
            folder = tmp_path / f"{role}-{number}"
            folder.mkdir()
            machines.append(Agl(folder, through=("ip", "netns", "exec", space), environment=KEY))
            stack.callback(machines[-1].stop)
            return machines[-1]

        yield make


@pytest.mark.storm
def test_a_run_over_a_network(machine: Callable[[str], Agl], monkeypatch: Any) -> None:
    for key in (WORKER_KEY, OPERATOR_KEY):
        monkeypatch.delenv(key, raising=False)
    trainer, *others = (machine(role) for role in ("trainer", "worker", "worker"))
    workers = [
        other.start("worker", CALC, f"--server=http://10.77.{number}.1:{PORT}", "--concurrency=6")
        for number, other in enumerate(others, 1)
    ]
    workers[0].until(lambda: all("working for" in worker.output() for worker in workers))
    settings = {**SETTINGS, "server.port": PORT}
    training = trainer.start("train", CALC, *(f"--set={key}={json.dumps(value)}" for key, value in settings.items()))

    training.until(lambda: f"step   1/{STEPS}  reward" in training.output())
    workers[0].kill()
    assert training.wait() == 0, training.output()
    assert workers[1].wait(60) == 0, workers[1].output()

    assert trainer.summary("calc")["steps"] == STEPS
    recorded = read_store(trainer.folder / "runs" / "calc" / "store.sqlite")
    attempts = {(attempt.rollout, attempt.attempt) for attempt in recorded.attempts}
    for rollout in recorded.rollouts:
        assert (rollout.state, rollout.ending) == (RolloutState.DONE, Ending.FINISHED)
        assert (rollout.id, rollout.counted_attempt) in attempts
    endings = Counter(attempt.ending for attempt in recorded.attempts)
    assert endings[Ending.FINISHED] == ROLLOUTS
    assert set(endings) <= {Ending.FINISHED, Ending.LOST}
