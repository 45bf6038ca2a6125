"""The scripts and the Dockerfile: by their linters, and by running them among stand-ins for Slurm and Ray."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .deployed import DEPLOY
from .slurm_stand_ins import BESIDE_PYTHON, NODES, Cluster

SBATCH = DEPLOY / "slurm" / "train.sbatch"
SCRIPTS = [DEPLOY / "train-or-resume", SBATCH]
ENDED_BY_SLURM = (0, -signal.SIGTERM, -signal.SIGKILL)
"""A job that was queued again: Slurm ends it, unless it comes to its own end before."""
RAY_KEYS = ["RAY_AUTH_MODE", "RAY_AUTH_TOKEN"]


def linted(*command: str | Path) -> None:
    tool = shutil.which(str(command[0]), path=BESIDE_PYTHON)
    assert tool is not None, f"{command[0]} is missing: make install brings it"
    done = subprocess.run([tool, *command[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_good_bash(script: Path) -> None:
    linted("bash", "-n", script)
    linted("shellcheck", script)
    assert os.access(script, os.X_OK)


def test_the_dockerfile_is_well_formed() -> None:
    linted("hadolint", "--failure-threshold=style", DEPLOY / "Dockerfile")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster.make(tmp_path)
    yield cluster
    for process in cluster.running():
        process.kill()


def settings(arguments: list[str]) -> list[str]:
    return [after for word, after in itertools.pairwise(arguments) if word == "--set"]


def test_a_job_starts_everything_trains_and_leaves_nothing_behind(cluster: Cluster) -> None:
    cluster.ended(cluster.submit(), 0)
    starts = [call[0] for call in cluster.calls("ray", "start")]
    assert sorted("--head" in words for words in starts) == [*[False] * (NODES - 1), True]
    assert {words[1] for words in starts if "--head" not in words} == {"--address=127.0.0.1:6379"}
    [(train, keys, _)] = cluster.calls("agl", "train")
    assert keys == ["AGL_WORKER_KEY", *RAY_KEYS]
    assert [keys for _, keys, _ in cluster.calls("ray", "start")] == [RAY_KEYS] * NODES
    assert {f"engine.verl.nodes={NODES}", "engine.verl.gpus_per_node=8", "engine.verl.address=127.0.0.1:6379"} < set(
        settings(train)
    )
    assert {"server.host=127.0.0.1", "server.port=8123"} < set(settings(train))
    workers = cluster.calls("agl", "worker")
    assert [keys for _, keys, _ in workers] == [["AGL_WORKER_KEY"]] * NODES, "agents see their worker's environment"
    assert {call[0][-1] for call in workers} == {"http://127.0.0.1:8123"}
    assert not cluster.calls("scontrol")
    # Each step has one task on each of its nodes, and shares them with the others: srun takes its defaults from what
    # sbatch set, which are the job's three tasks, also on one node.
    steps = [call[0] for call in cluster.calls("srun")]
    options = [[word for word in step if word.startswith("--") and step.index(word) < 7] for step in steps]
    [head] = [step for step in options if "--nodelist=node-1" in step]
    [others] = [step for step in options if "--exclude=node-1" in step]
    [everywhere] = [step for step in options if step not in (head, others)]
    for step, nodes in ((head, 1), (others, NODES - 1), (everywhere, NODES)):
        assert {f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"} < set(step)
        assert "--overlap" in step, "it would wait for what the steps before it have: CPUs, memory, GPUs"
        assert "--exact" not in step, "Ray would find one CPU of each node"
        assert not any(word.startswith(("--cpus-per-task", "--mem")) for word in step), "all that the job has"
    assert "#SBATCH --mem=0\n" in SBATCH.read_text(), "--exclusive alone does not give a node's memory"


def test_the_same_line_goes_on_where_the_last_job_ended(cluster: Cluster) -> None:
    cluster.ended(cluster.submit(TRAINS="3"), 3)
    cluster.ended(cluster.submit(SLURM_JOB_ID="8"), 0)
    first, second = (call[0] for call in cluster.calls("agl", "train"))
    assert "--resume" not in first
    assert second[:3] == ["train", "--resume", str(cluster.folder / "runs" / "calc-64")]
    assert second[3:] == first[6:], "the cluster is that of the new job"


def test_sigterm_has_the_trainer_stop(cluster: Cluster) -> None:
    job = cluster.trains()
    job.send_signal(signal.SIGTERM)
    cluster.ended(job, 0)
    assert cluster.calls("scontrol") == []


def test_a_job_whose_time_is_up_queues_itself_again(cluster: Cluster) -> None:
    job = cluster.trains()
    job.send_signal(signal.SIGUSR1)
    cluster.ended(job, *ENDED_BY_SLURM)
    assert [call[0] for call in cluster.calls("scontrol")] == [["requeue", "7"]]
    cluster.ended(cluster.submit(), 0)
    assert "--resume" in cluster.calls("agl", "train")[1][0]


def test_a_trainer_that_does_not_end_in_time_is_killed_and_costs_its_checkpoint(cluster: Cluster) -> None:
    job = cluster.trains(TRAINS="stuck", GRACE="1")
    job.send_signal(signal.SIGUSR1)
    cluster.ended(job, *ENDED_BY_SLURM)
    assert "did not end within 1 s" in cluster.log()
    assert [call[0] for call in cluster.calls("scontrol")] == [["requeue", "7"]]


def test_there_is_time_for_the_steps_after_the_trainer() -> None:
    script = SBATCH.read_text()
    [notice] = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", script, re.MULTILINE)
    [grace] = re.findall(r"\$\{GRACE:-(\d+)\}", script)
    # Slurm may send it a minute early or late, and the steps get a minute.
    assert int(notice) - int(grace) - 2 * 60 >= 60
    assert re.search(rf"^# GRACE .* {grace}$", script, re.MULTILINE)


def test_a_job_without_what_it_needs_says_what_is_missing(cluster: Cluster) -> None:
    del cluster.environment["RUNS"]
    assert cluster.submit().wait(30) == 1
    assert re.search("RUNS: a folder that every node sees", cluster.log())
