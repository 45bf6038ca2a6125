"""`agl serve` where nothing is installed that trains, and agl where nothing is that serves."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w

from agl_core.cli.doctor import SERVER_MODULES
from agl_core.client import BlockingClient
from agl_core.config.load import load_for_server, load_for_workers
from agl_core.wire.keys import WORKER_KEY

CONFIG: dict[str, Any] = {
    "config_version": 1,
    "agent": {"entry": "an_agent:solve"},
    "tasks": {"train": {"source": "absent", "token": "a secret"}},
    "policies": {
        "default": {"model": {"path": "./absent"}, "algorithm": {"name": "own", "own": {"token": "a secret"}}}
    },
    "rewards": {"right": {"rule": "absent", "weight": 0.5, "token": "a secret"}},
    "credit": {"name": "identical"},
    "algorithm": {"name": "absent", "absent": {"token": "a secret"}},
    "engine": {"name": "absent", "absent": {"token": "a secret"}},
    "trackers": {"absent": {"token": "a secret"}},
}


def test_a_server_needs_its_store_and_nothing_that_trains(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(tomli_w.dumps(CONFIG))
    command = (sys.executable, "-c", "from agl_core.cli import main; main()", "serve", "train.toml")
    variables = {**os.environ, WORKER_KEY: "a-worker's-key"}
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        try:
            with BlockingClient(url, "a-worker's-key") as client:
                assert client.health().run == "run"
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate()
    assert server.returncode == 0

    run = tmp_path / "runs" / "run"
    written = (run / "config.toml").read_text()
    assert "secret" not in written, "which settings of an absent plugin are secrets is not known"
    again = load_for_server(run / "config.toml").config
    assert (again.engine.name, again.algorithm.name, again.credit.name) == ("absent", "absent", "identical")
    assert (again.rewards["right"].rule, again.rewards["right"].weight) == ("absent", 0.5)
    assert again.tasks["train"].source == "absent"
    listed = without_server_packages("rollouts", str(run), folder=tmp_path)
    assert listed.returncode == 0, listed.stderr


def test_the_commands_that_it_prints_are_of_the_same_run(tmp_path: Path) -> None:
    """Whatever settings it was given, and from a run's folder too."""
    (tmp_path / "my train.toml").write_text(tomli_w.dumps(CONFIG))
    given = ("--set", "name=another", "--set", f"runs={tmp_path / 'my runs'}", "--set", "train.steps=3")
    printed = printed_by(tmp_path, "my train.toml", *given)
    for command in ("train", "work"):
        agl, _, file, *rest = printed[command]
        assert (agl, rest[-2]) == ("agl", "--server")
        config = load_for_workers(tmp_path / file, [each for each in rest[:-2] if each != "--set"])
        assert (config.name, config.runs, config.train.steps) == ("another", tmp_path / "my runs", 3)

    printed = printed_by(tmp_path, "my runs/another")
    assert printed["train"][2:4] == ["--resume", "my runs/another"], "a new run would be another one"
    assert printed["work"][2] == "my runs/another"


def printed_by(folder: Path, *arguments: str) -> dict[str, list[str]]:
    """The words of the commands that a server prints, by what they are for."""
    command = (sys.executable, "-c", "from agl_core.cli import main; main()", "serve", *arguments)
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            lines = [server.stdout.readline() for _ in range(3)]
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate()
    return {line.partition(":")[0]: shlex.split(line.partition(":")[2]) for line in lines[1:]}


def test_without_its_packages_the_remedy_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(tomli_w.dumps(CONFIG))
    done = without_server_packages("serve", "train.toml", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("pip install 'agl-core[server]'")


def without_server_packages(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """agl as it is where only `agl-core` is installed."""
    code = f"import sys; sys.modules.update(dict.fromkeys({SERVER_MODULES})); from agl_core.cli import main; main()"
    command = (sys.executable, "-c", code, *arguments)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
