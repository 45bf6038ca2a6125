"""Stand-ins for Slurm and Ray: three nodes that are this machine, and what sbatch gives a job there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .deployed import DEPLOY

BESIDE_PYTHON = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
NODES = 3
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_NNODES": f"{NODES}",
    "SLURM_NTASKS": f"{NODES}",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURMD_NODENAME": "node-1",
    "SLURM_SUBMIT_DIR": str(DEPLOY.parent),
}
"""Variables that sbatch sets, so far as the script or srun reads them."""

COMMANDS = ("srun", "scontrol", "ray", "agl")
SOURCE = f"""#!{sys.executable}
import json, os, pathlib, signal, subprocess, sys, time
name, arguments = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
keys = sorted(each for each in os.environ if each.startswith(("AGL_", "RAY_AUTH_")))
with open(os.environ["CALLED"], "a") as called:
    called.write(json.dumps([name, arguments, keys, os.getpid()]) + "\\n")
if name == "srun":
    # As many tasks as it is told, or as the job has: src/srun/libsrun/opt.c of SchedMD/slurm.
    at = next(at for at, each in enumerate(arguments) if not each.startswith("--"))
    options = dict(each[2:].partition("=")[::2] for each in arguments[:at])
    tasks, signals = [], []
    def end(*_):
        signals.append(1)
        for task in tasks:
            task.terminate()
    signal.signal(signal.SIGTERM, end)
    for _ in range(int(options.get("ntasks", os.environ["SLURM_NTASKS"]))):
        tasks.append(subprocess.Popen(arguments[at:]))
    if signals:  # It came while tasks were started.
        end()
    sys.exit(max(task.wait() for task in tasks))
if name == "scontrol":
    # Returns at once. Then slurmd ends everything of the job: SIGTERM, and SIGKILL after KillWait.
    group = os.getpgrp()
    if os.fork() == 0:
        os.setsid()
        os.killpg(group, signal.SIGTERM)
        os.killpg(group, signal.SIGKILL)
    sys.exit(0)
if name == "agl" and arguments[0] == "train":
    options = dict(zip(arguments, arguments[1:]))
    sets = dict(after.split("=", 1) for word, after in zip(arguments, arguments[1:]) if word == "--set")
    stuck = os.environ["TRAINS"] == "stuck"
    signal.signal(signal.SIGTERM, signal.SIG_IGN if stuck else lambda *_: sys.exit(0))
    if "--resume" not in options:
        run = pathlib.Path(sets["runs"]) / sets["name"]
        run.mkdir(parents=True)
        (run / "metrics.jsonl").touch()
    if os.environ["TRAINS"].isdigit():
        def works_for_this_job(name, arguments, keys, pid):
            try:
                return arguments[:1] == ["worker"] and os.getsid(pid) == os.getsid(0)
            except ProcessLookupError:
                return False
        while sum(works_for_this_job(*json.loads(line)) for line in open(os.environ["CALLED"])) < {NODES}:
            time.sleep(0.1)
        sys.exit(int(os.environ["TRAINS"]))
    while True:
        time.sleep(0.1)
if name in ("agl", "ray"):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        time.sleep(0.1)
"""
FAKE_RAY = f"""
import os
def init(**_): assert os.environ["RAY_AUTH_TOKEN"]
def nodes(): return [{{"Alive": True}}] * {NODES}
def shutdown(): pass
"""


@dataclass
class Cluster:
    """A cluster with one job at most."""

    folder: Path
    environment: dict[str, str]

    @classmethod
    def make(cls, folder: Path) -> Cluster:
        for name in ("bin", "venv/bin", "modules"):
            (folder / name).mkdir(parents=True)
        (folder / "venv" / "bin" / "activate").touch()
        for name, source in {**dict.fromkeys(COMMANDS, SOURCE), "hostname": "#!/bin/sh\necho 127.0.0.1\n"}.items():
            (folder / "bin" / name).write_text(source)
            (folder / "bin" / name).chmod(0o755)
        (folder / "modules" / "ray.py").write_text(FAKE_RAY)
        there = {name: value for name, value in os.environ.items() if not name.startswith(("AGL_", "RAY_", "SLURM"))}
        own = {
            "PATH": os.pathsep.join([str(folder / "bin"), BESIDE_PYTHON]),
            "PYTHONPATH": os.pathsep.join([str(folder / "modules"), os.environ["PYTHONPATH"]]),
            "CALLED": str(folder / "called"),
            "TRAINS": "0",
            "VENV": str(folder / "venv"),
            "RUNS": str(folder / "runs"),
        }
        return cls(folder, there | JOB | own)

    def submit(self, **more: str) -> subprocess.Popen[str]:
        """The job's process, which leads a group of its own."""
        log = (self.folder / "log").open("a")
        script = [DEPLOY / "slurm" / "train.sbatch", DEPLOY / "configs" / "64-gpus.toml", "calc-64"]
        return subprocess.Popen(
            ["bash", *map(str, script)],
            env=self.environment | more, cwd=self.folder, stdout=log, stderr=log, text=True, start_new_session=True,
        )  # fmt: skip

    def trains(self, **more: str) -> subprocess.Popen[str]:
        """A job whose trainer and workers run."""
        job = self.submit(**{"TRAINS": "on", **more})
        self.until(job, lambda: bool(self.calls("agl", "train") and self.calls("agl", "worker")))
        self.until(job, (self.folder / "runs" / "calc-64" / "metrics.jsonl").exists)
        return job

    def calls(self, name: str, first: str = "") -> list[Any]:
        """The calls of this name: arguments, the keys in the environment, process."""
        log = self.folder / "called"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [call[1:] for call in lines if call[0] == name and call[1][: bool(first)] == ([first] if first else [])]

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def until(self, job: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            assert job.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def ended(self, job: subprocess.Popen[str], *codes: int) -> None:
        assert job.wait(90) in codes, self.log()
        deadline = time.monotonic() + 10
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.running() == []

    def running(self) -> list[psutil.Process]:
        """The processes that were started and still run."""
        processes = []
        for name in ("srun", "agl", "ray"):
            for *_, pid in self.calls(name):
                try:
                    process = psutil.Process(pid)
                    if str(self.folder) in " ".join(process.cmdline()):
                        processes.append(process)
                except psutil.Error:
                    continue
        return processes
