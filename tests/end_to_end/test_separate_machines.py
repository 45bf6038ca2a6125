"""Server, trainer and two workers on machines of their own: network namespaces with an address each."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agl_core.types import Ending
from agl_core.wire.keys import OPERATOR_KEY, WORKER_KEY

from .conftest import Agl
from .test_apart import ROLLOUTS, STEPS, recorded
from .test_external_workers import all_attempts, slow_run

KEYS = {
    "server": {WORKER_KEY: "the-workers-key", OPERATOR_KEY: "the-operators-key"},
    "trainer": {OPERATOR_KEY: "the-operators-key"},
    "worker": {WORKER_KEY: "the-workers-key"},
}
"""What each machine is told; nobody knows a key that is not his."""
PORT = 8123


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[[str], Agl]]:
    """Makes machines: `server`, and others, each joined to it by a network of two: it has 10.77.N.2, the server .1."""
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
            made.append(Agl(folder, through=("ip", "netns", "exec", space), environment=KEYS[role]))
            stack.callback(made[-1].stop)
            return made[-1]

        yield make


@pytest.mark.storm
def test_a_run_over_a_network(machine: Callable[[str], Agl], monkeypatch: Any) -> None:
    for each in (WORKER_KEY, OPERATOR_KEY):
        monkeypatch.delenv(each, raising=False)
    server, trainer, *others = (machine(role) for role in ("server", "trainer", "worker", "worker"))
    for each in (server, trainer, *others):
        config, *settings = slow_run(each)
    serving = server.start("serve", config, "--host=0.0.0.0", f"--port={PORT}", *settings)
    serving.until(lambda: "work: " in serving.output())
    workers = [
        each.start("worker", config, f"--server=http://10.77.{number}.1:{PORT}", "--concurrency=6")
        for number, each in enumerate(others, 2)
    ]
    at_server = f"--server=http://10.77.1.1:{PORT}"
    deaf = trainer.start("train", config, at_server, *settings, "--set=name=deaf")
    assert deaf.wait() != 0
    assert "[engine.torch] host" in deaf.output()
    training = trainer.start("train", config, at_server, *settings, "--set=engine.torch.host=10.77.1.2")

    training.until(lambda: "step   1/3  reward" in training.output())
    workers[0].kill()
    again = others[0].start("worker", config, f"--server=http://10.77.2.1:{PORT}", "--concurrency=6")
    assert training.wait() == 0, training.output()
    for worker in (again, workers[1]):
        assert worker.wait(60) == 0, worker.output()
    os.kill(serving.process.pid, signal.SIGTERM)
    assert serving.wait(60) == 0, serving.output()

    assert trainer.summary("calc")["steps"] == STEPS
    assert not (trainer.folder / "runs" / "calc" / "store.sqlite").exists(), "what is recorded is on the server"
    store = server.folder / "runs" / "calc" / "store.sqlite"
    endings = Counter(each.ending for each in all_attempts(store))
    assert endings[Ending.FINISHED] == ROLLOUTS
    assert set(endings) <= {Ending.FINISHED, Ending.LOST}
    _, training_records, calls = recorded(store)
    assert {record.step for record in training_records} == {1, 2, 3}
    assert set(calls.values()) == {1}
