"""The trainer and two workers on machines of their own: network namespaces with an address each."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agl_core.store.sqlite import SqliteStore
from agl_core.types import Attempt, Ending, RolloutState
from agl_core.wire.keys import OPERATOR_KEY, WORKER_KEY

from .conftest import Agl

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


KEY = {WORKER_KEY: "the-workers-key"}
PORT, STEPS = 8123, 3
ROLLOUTS = 1 + STEPS * 12 + 2 * 2 * 2
"""The first look, those of training, and of two held-out sets before and after."""


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


def slow_run(agl: Any, **changes: Any) -> list[str]:
    """The arguments to train a slow, sync agent without a worker; the configuration is slow.toml."""
    (agl.folder / "slow_agent.py").write_text(SLOW_AGENT)
    config = (CALC / "train.toml").read_text()
    config = config.replace('"agent:solve"', '"slow_agent:solve"').replace('"tasks.py"', f'"{CALC / "tasks.py"}"')
    (agl.folder / "slow.toml").write_text(config.replace('"policy"', f'"{CALC / "policy"}"'))
    return ["slow.toml", *(f"--set={key}={json.dumps(value)}" for key, value in {**SETTINGS, **changes}.items())]


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
        made: list[Agl] = []

        def make(role: str) -> Agl:
            number = len(made)
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
            made.append(Agl(folder, through=("ip", "netns", "exec", space), environment=KEY))
            stack.callback(made[-1].stop)
            return made[-1]

        yield make


@pytest.mark.storm
def test_a_run_over_a_network(machine: Callable[[str], Agl], monkeypatch: Any) -> None:
    for each in (WORKER_KEY, OPERATOR_KEY):
        monkeypatch.delenv(each, raising=False)
    trainer, *others = (machine(role) for role in ("trainer", "worker", "worker"))
    for each in (trainer, *others):
        config, *settings = slow_run(each)
    workers = [
        each.start("worker", config, f"--server=http://10.77.{number}.1:{PORT}", "--concurrency=6")
        for number, each in enumerate(others, 1)
    ]
    workers[0].until(lambda: all("working for" in worker.output() for worker in workers))
    store = trainer.folder / "runs" / "calc" / "store.sqlite"
    training = trainer.start("train", config, *settings, "--set=server.host=0.0.0.0", f"--set=server.port={PORT}")

    training.until(lambda: f"step   1/{STEPS}  reward" in training.output())
    workers[0].kill()
    assert training.wait() == 0, training.output()
    assert workers[1].wait(60) == 0, workers[1].output()

    assert trainer.summary("calc")["steps"] == STEPS
    endings = Counter(each.ending for each in all_attempts(store))
    assert endings[Ending.FINISHED] == ROLLOUTS
    assert set(endings) <= {Ending.FINISHED, Ending.LOST}
