"""The scripts and the Dockerfile: by their linters, and by running them among stand-ins for Slurm and Ray."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from deployed import DEPLOY

SCRIPTS = [DEPLOY / "train-or-resume", DEPLOY / "slurm" / "train.sbatch"]
BESIDE_PYTHON = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time
name, arguments = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
if name == "srun":
    command = arguments[next(at for at, each in enumerate(arguments) if not each.startswith("--")):]
keys = sorted(each for each in os.environ if each.startswith("AGL_"))
with open(os.environ["CALLED"], "a") as called:
    called.write(json.dumps([name, arguments, keys, os.getpid()]) + "\\n")
if name == "srun":
    os.execvp(command[0], command)
if name == "agl" and arguments[0] == "serve":
    os.execv({str(Path(sys.executable).with_name("agl"))!r}, ["agl", *arguments])
if name == "agl" and arguments[0] == "train":
    options = dict(zip(arguments, arguments[1:]))
    sets = dict(after.split("=", 1) for word, after in zip(arguments, arguments[1:]) if word == "--set")
    if "--resume" not in options:
        run = pathlib.Path(sets["runs"]) / sets["name"]
        run.mkdir(parents=True)
        (run / "metrics.jsonl").touch()
    if os.environ["TRAINS"] != "on":
        sys.exit(int(os.environ["TRAINS"]))
if name in ("agl", "ray"):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        time.sleep(0.1)
"""
FAKE_RAY = "def init(**_): pass\ndef nodes(): return [{'Alive': True}] * 2\ndef shutdown(): pass\n"


def linted(*command: str | Path) -> None:
    tool = shutil.which(str(command[0]), path=BESIDE_PYTHON)
    assert tool is not None, f"{command[0]} is missing: make install brings it"
    found = subprocess.run([tool, *command[1:]], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda each: each.name)
def test_scripts_are_good_bash(script: Path) -> None:
    linted("bash", "-n", script)
    linted("shellcheck", script)
    assert os.access(script, os.X_OK)


def test_the_dockerfile_is_well_formed() -> None:
    linted("hadolint", "--failure-threshold=style", DEPLOY / "Dockerfile")


@dataclass
class Cluster:
    """Two nodes that are this machine."""

    folder: Path
    environment: dict[str, str]

    def submit(self, **more: str) -> subprocess.Popen[str]:
        log = (self.folder / "log").open("a")
        script = [DEPLOY / "slurm" / "train.sbatch", DEPLOY / "configs" / "64-gpus.toml", "calc-64"]
        return subprocess.Popen(
            ["bash", *map(str, script)], env=self.environment | more, cwd=self.folder, stdout=log, stderr=log, text=True
        )

    def calls(self, name: str, first: str = "") -> list[Any]:
        """What was called by this name: arguments, agl's variables, process."""
        log = self.folder / "called"
        lines = [json.loads(each) for each in log.read_text().splitlines()] if log.exists() else []
        return [each[1:] for each in lines if each[0] == name and each[1][: bool(first)] == ([first] if first else [])]

    def until(self, process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            assert process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)

    def ended(self, process: subprocess.Popen[str], code: int) -> None:
        assert process.wait(90) == code, (self.folder / "log").read_text()
        assert self.left() == []

    def left(self) -> list[psutil.Process]:
        """What was started and still runs."""
        pids = [each[2] for name in ("agl", "ray") for each in self.calls(name)]
        running = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        return [each for each in running if str(self.folder) in " ".join(each.cmdline())]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").touch()
    for name in ("srun", "scontrol", "ray", "agl"):
        stand_in = tmp_path / "bin" / name
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(STAND_IN)
        stand_in.chmod(0o755)
    (tmp_path / "hostname").write_text("#!/bin/sh\necho 127.0.0.1\n")
    (tmp_path / "hostname").chmod(0o755)
    shutil.move(tmp_path / "hostname", tmp_path / "bin" / "hostname")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "ray.py").write_text(FAKE_RAY)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AGL_")},
        "PATH": os.pathsep.join([str(tmp_path / "bin"), BESIDE_PYTHON]),
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "modules"), os.environ["PYTHONPATH"]]),
        "CALLED": str(tmp_path / "called"),
        "TRAINS": "0",
        "VENV": str(tmp_path / "venv"),
        "RUNS": str(tmp_path / "runs"),
        "LOCAL": str(tmp_path / "local"),
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURMD_NODENAME": "node-1",
        "SLURM_SUBMIT_DIR": str(DEPLOY.parent),
    }
    (tmp_path / "local").mkdir()
    with socket.socket() as probe:  # the script has one port, as a whole node is its own
        if probe.connect_ex(("127.0.0.1", 8123)) == 0:
            pytest.fail("port 8123 is taken")
    cluster = Cluster(tmp_path, environment)
    yield cluster
    for left in cluster.left():
        left.kill()


def settings(arguments: list[str]) -> list[str]:
    return [after for word, after in itertools.pairwise(arguments) if word == "--set"]


def test_a_job_starts_everything_trains_and_leaves_nothing_behind(cluster: Cluster) -> None:
    cluster.ended(cluster.submit(), 0)
    starts = [each[0] for each in cluster.calls("ray", "start")]
    assert sorted("--head" in each for each in starts) == [False, True]
    assert next(each for each in starts if "--head" not in each)[1] == "--address=127.0.0.1:6379"
    spread = [each[0] for each in cluster.calls("srun")]
    assert next(each for each in spread if "--head" in each)[2:4] == ["--nodes=1", "--nodelist=node-1"]
    assert next(each for each in spread if "--address=127.0.0.1:6379" in each)[2:4] == ["--nodes=1", "--exclude=node-1"]
    assert "--nodes=2" in next(each for each in spread if "worker" in each)
    [(train, keys, _)] = cluster.calls("agl", "train")
    assert keys == ["AGL_OPERATOR_KEY"]
    assert {"engine.verl.nodes=2", "engine.verl.gpus_per_node=8", "engine.verl.address=127.0.0.1:6379"} < set(
        settings(train)
    )
    [(_, keys, _)] = cluster.calls("agl", "worker")
    assert keys == ["AGL_WORKER_KEY"], "agents see their worker's environment"
    [(_, keys, _)] = cluster.calls("agl", "serve")
    assert keys == ["AGL_OPERATOR_KEY", "AGL_WORKER_KEY"]
    assert (cluster.folder / "runs" / "stores" / "calc-64" / "store.sqlite").is_file()
    assert not list((cluster.folder / "local").iterdir())
    assert not cluster.calls("scontrol")


def test_the_same_line_goes_on_where_the_last_job_ended(cluster: Cluster) -> None:
    cluster.ended(cluster.submit(TRAINS="3"), 3)
    secret = json.loads((cluster.folder / "runs/stores/calc-64/server.json").read_text())["agent_secret"]
    cluster.ended(cluster.submit(SLURM_JOB_ID="8"), 0)
    first, second = (each[0] for each in cluster.calls("agl", "train"))
    assert "--resume" not in first
    assert second[:3] == ["train", "--resume", str(cluster.folder / "runs" / "calc-64")]
    assert second[3:] == first[6:], "the server and the cluster are those of the new job"
    again = json.loads((cluster.folder / "runs/stores/calc-64/server.json").read_text())["agent_secret"]
    assert again == secret, "the server took its old store up"


@pytest.mark.parametrize(("sent", "queued_again"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_stops_the_trainer_and_one_of_them_queues_the_job_again(
    cluster: Cluster, sent: signal.Signals, queued_again: bool
) -> None:
    job = cluster.submit(TRAINS="on")
    cluster.until(job, lambda: bool(cluster.calls("agl", "train")) and bool(cluster.calls("agl", "worker")))
    metrics = cluster.folder / "runs" / "calc-64" / "metrics.jsonl"
    cluster.until(job, metrics.exists)
    time.sleep(0.5)
    job.send_signal(sent)
    cluster.ended(job, 0)
    assert [each[0] for each in cluster.calls("scontrol")] == ([["requeue", "7"]] if queued_again else [])
    assert (cluster.folder / "runs" / "stores" / "calc-64" / "store.sqlite").is_file()


def test_a_lost_server_ends_the_job(cluster: Cluster) -> None:
    job = cluster.submit(TRAINS="on")
    cluster.until(job, lambda: bool(cluster.calls("agl", "train")))
    cluster.until(job, (cluster.folder / "runs" / "calc-64" / "metrics.jsonl").exists)
    [(_, _, pid)] = cluster.calls("agl", "serve")
    os.kill(pid, signal.SIGKILL)
    assert job.wait(60) == 1
    assert "the Lightning Server ended" in (cluster.folder / "log").read_text()


def test_a_job_without_what_it_needs_says_what_is_missing(cluster: Cluster) -> None:
    del cluster.environment["RUNS"]
    assert cluster.submit().wait(30) == 1
    assert re.search("RUNS: a folder that every node sees", (cluster.folder / "log").read_text())
