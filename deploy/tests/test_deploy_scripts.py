"""The scripts and the Dockerfile: by their linters, and by running them among stand-ins for Slurm and Ray."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from .deployed import DEPLOY
from .slurm_stand_ins import BESIDE_PYTHON, NODES, Cluster

SBATCH = DEPLOY / "slurm" / "train.sbatch"
SAVE = DEPLOY / "slurm" / "save_store.py"
SCRIPTS = [DEPLOY / "train-or-resume", SBATCH]
RAY_KEYS = ["RAY_AUTH_MODE", "RAY_AUTH_TOKEN"]


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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with socket.socket() as probe:  # the script has one port, as a whole node is its own
        if probe.connect_ex(("127.0.0.1", 8123)) == 0:
            pytest.fail("port 8123 is taken")
    cluster = Cluster.make(tmp_path)
    yield cluster
    for left in cluster.left():
        left.kill()


def settings(arguments: list[str]) -> list[str]:
    return [after for word, after in itertools.pairwise(arguments) if word == "--set"]


def secret(folder: Path) -> str:
    """What a server makes once for its store."""
    return str(json.loads((folder / "server.json").read_text())["agent_secret"])


def is_whole(store: Path) -> bool:
    """Also without a write-ahead log beside it."""
    with closing(sqlite3.connect(f"{store.as_uri()}?immutable=1", uri=True)) as connection:
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        return bool(tables and connection.execute("PRAGMA integrity_check").fetchone() == ("ok",))


def test_a_job_starts_everything_trains_and_leaves_nothing_behind(cluster: Cluster) -> None:
    cluster.ended(cluster.submit(), 0)
    starts = [each[0] for each in cluster.calls("ray", "start")]
    assert sorted("--head" in each for each in starts) == [*[False] * (NODES - 1), True]
    assert {each[1] for each in starts if "--head" not in each} == {"--address=127.0.0.1:6379"}
    [(train, keys, _)] = cluster.calls("agl", "train")
    assert keys == ["AGL_OPERATOR_KEY", *RAY_KEYS]
    assert [keys for _, keys, _ in cluster.calls("ray", "start")] == [RAY_KEYS] * NODES
    assert {f"engine.verl.nodes={NODES}", "engine.verl.gpus_per_node=8", "engine.verl.address=127.0.0.1:6379"} < set(
        settings(train)
    )
    workers = [keys for _, keys, _ in cluster.calls("agl", "worker")]
    assert workers == [["AGL_WORKER_KEY"]] * NODES, "agents see their worker's environment"
    [(_, keys, _)] = cluster.calls("agl", "serve")
    assert keys == ["AGL_OPERATOR_KEY", "AGL_WORKER_KEY"]
    assert is_whole(cluster.kept / "store.sqlite")
    assert not list((cluster.folder / "local").iterdir())
    assert not cluster.calls("scontrol")


def test_each_step_has_one_task_on_each_of_its_nodes_and_shares_them_with_the_others(cluster: Cluster) -> None:
    """srun takes its defaults from what sbatch set: the job's 3 tasks, also on one node."""
    cluster.ended(cluster.submit(), 0)
    steps = [each[0] for each in cluster.calls("srun")]
    options = [[each for each in step if each.startswith("--") and step.index(each) < 7] for step in steps]
    [head] = [each for each in options if "--nodelist=node-1" in each]
    [others] = [each for each in options if "--exclude=node-1" in each]
    [workers] = [each for each in options if each not in (head, others)]
    for step, nodes in ((head, 1), (others, NODES - 1), (workers, NODES)):
        assert {f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"} < set(step)
        assert "--overlap" in step, "it would wait for what the steps before it have: CPUs, memory, GPUs"
        assert "--exact" not in step, "Ray would find one CPU of each node"
        assert not any(each.startswith(("--cpus-per-task", "--mem")) for each in step), "all that the job has"
    assert "#SBATCH --mem=0\n" in SBATCH.read_text(), "--exclusive alone does not give a node's memory"


def test_the_same_line_goes_on_where_the_last_job_ended(cluster: Cluster) -> None:
    cluster.ended(cluster.submit(TRAINS="3"), 3)
    made = secret(cluster.kept)
    cluster.ended(cluster.submit(SLURM_JOB_ID="8"), 0)
    first, second = (each[0] for each in cluster.calls("agl", "train"))
    assert "--resume" not in first
    assert second[:3] == ["train", "--resume", str(cluster.folder / "runs" / "calc-64")]
    assert second[3:] == first[6:], "the server and the cluster are those of the new job"
    assert secret(cluster.kept) == made, "the server took its old store up"


def test_sigterm_has_the_trainer_stop_and_the_store_kept(cluster: Cluster) -> None:
    job = cluster.trains()
    job.send_signal(signal.SIGTERM)
    cluster.ended(job, 0)
    assert cluster.calls("scontrol") == []
    assert is_whole(cluster.kept / "store.sqlite")


def test_a_job_whose_time_is_up_queues_itself_again_when_its_store_is_kept(cluster: Cluster) -> None:
    job = cluster.trains()
    job.send_signal(signal.SIGUSR1)
    cluster.ended(job, -signal.SIGTERM, -signal.SIGKILL)  # by Slurm, as soon as it is queued again
    assert [each[0] for each in cluster.calls("scontrol")] == [["requeue", "7"]]
    assert is_whole(cluster.kept / "store.sqlite")
    made = secret(cluster.kept)
    cluster.ended(cluster.submit(), 0)
    assert secret(cluster.kept) == made
    assert "--resume" in cluster.calls("agl", "train")[1][0]


def test_a_trainer_that_does_not_end_in_time_costs_its_checkpoint_and_not_the_store(cluster: Cluster) -> None:
    job = cluster.trains(TRAINS="stuck", GRACE="1")
    job.send_signal(signal.SIGUSR1)
    cluster.ended(job, -signal.SIGTERM, -signal.SIGKILL)
    assert "did not end within 1 s" in cluster.log()
    assert [each[0] for each in cluster.calls("scontrol")] == [["requeue", "7"]]
    assert is_whole(cluster.kept / "store.sqlite")


def test_there_is_time_to_keep_the_store_after_the_trainer() -> None:
    script = SBATCH.read_text()
    [told] = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", script, re.MULTILINE)
    [grace] = re.findall(r"\$\{GRACE:-(\d+)\}", script)
    # Slurm may send it a minute early or late; the server and the steps get a minute each.
    assert int(told) - int(grace) - 60 - 2 * 60 >= 300
    for name, default in re.findall(r"\$\{(SAVE_EVERY|GRACE):-(\d+)\}", script):
        assert re.search(rf"^# {name} .* {default}$", script, re.MULTILINE)


def test_a_job_that_cannot_keep_its_store_says_where_it_is_and_is_not_queued_again(cluster: Cluster) -> None:
    job = cluster.trains()
    cluster.kept.parent.write_text("in the way")
    job.send_signal(signal.SIGUSR1)
    cluster.ended(job, 1)
    there = cluster.folder / "local" / "agl-7" / "calc-64"
    assert f"the store was not saved: it is in {there} on node-1" in cluster.log()
    assert is_whole(there / "store.sqlite")
    assert cluster.calls("scontrol") == []


def test_a_lost_node_costs_what_came_after_the_last_copy_of_the_store(cluster: Cluster) -> None:
    job = cluster.trains(SAVE_EVERY="1")
    cluster.until(job, (cluster.kept / "store.sqlite").exists)
    os.killpg(job.pid, signal.SIGKILL)
    cluster.ended(job, -signal.SIGKILL)
    assert is_whole(cluster.kept / "store.sqlite")
    made = secret(cluster.kept)
    left = cluster.folder / "local" / "agl-7" / "calc-64"
    (left / "store.sqlite").write_text("torn")
    cluster.ended(cluster.submit(), 0)  # Slurm queues it again by itself, under the same number
    assert secret(cluster.kept) == made
    assert not left.exists()


def test_a_lost_server_ends_the_job(cluster: Cluster) -> None:
    job = cluster.trains()
    [(_, _, pid)] = cluster.calls("agl", "serve")
    os.kill(pid, signal.SIGKILL)
    cluster.ended(job, 1)
    assert "the Lightning Server ended" in cluster.log()
    assert is_whole(cluster.kept / "store.sqlite")


def test_a_job_without_what_it_needs_says_what_is_missing(cluster: Cluster) -> None:
    del cluster.environment["RUNS"]
    assert cluster.submit().wait(30) == 1
    assert re.search("RUNS: a folder that every node sees", cluster.log())


def saved(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SAVE, source, target], capture_output=True, text=True, check=False)


def test_a_copy_of_the_store_has_what_is_in_its_write_ahead_log_while_somebody_writes(tmp_path: Path) -> None:
    run, kept = tmp_path / "run", tmp_path / "kept"
    run.mkdir()
    (run / "server.json").write_text("{}")
    (run / "store.sqlite.lock").write_text("")
    with closing(sqlite3.connect(run / "store.sqlite", isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("CREATE TABLE calls (id INTEGER)")
        writer.execute("INSERT INTO calls VALUES (1)")
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("INSERT INTO calls VALUES (2)")
        assert (run / "store.sqlite-wal").stat().st_size
        assert saved(run, kept).returncode == 0
        writer.execute("COMMIT")
        assert {each.name for each in kept.iterdir()} == {"store.sqlite", "server.json"}
        assert {each.stat().st_mode & 0o777 for each in kept.iterdir()} == {0o600}, "there are keys"
        assert is_whole(kept / "store.sqlite")
        with closing(sqlite3.connect(kept / "store.sqlite")) as reader:
            assert reader.execute("SELECT id FROM calls").fetchall() == [(1,)]
        assert saved(run, kept).returncode == 0
    with closing(sqlite3.connect(kept / "store.sqlite")) as reader:
        assert reader.execute("SELECT id FROM calls").fetchall() == [(1,), (2,)]
    assert not (run / "store.sqlite.snapshot").exists()


def test_a_copy_that_fails_leaves_the_one_before_it(tmp_path: Path) -> None:
    run, kept = tmp_path / "run", tmp_path / "kept"
    run.mkdir()
    with closing(sqlite3.connect(run / "store.sqlite")) as writer:
        writer.execute("CREATE TABLE calls (id INTEGER)")
    assert saved(run, kept).returncode == 0
    before = (kept / "store.sqlite").read_bytes()
    (run / "store.sqlite").write_text("this is no database, and long enough to be looked at")
    failed = saved(run, kept)
    assert failed.returncode == 1
    assert re.match(r"the store was not copied to .*kept, where the copy before it stays", failed.stderr)
    assert (kept / "store.sqlite").read_bytes() == before
