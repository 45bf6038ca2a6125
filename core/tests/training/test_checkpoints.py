"""Checkpoints are whole or not there, and metrics of superseded steps go."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from agl_core.errors import CheckpointError
from agl_core.training.checkpoints import Checkpoints, RunState, model_links, read_state, verify
from agl_core.training.metrics import MetricsLog
from agl_core.types import DropReason


def save(checkpoints: Checkpoints, step: int) -> Path:
    part = checkpoints.begin(step)
    (part / "weights").write_text(str(step))
    return checkpoints.commit(part, RunState(step=step, dropped={"ending": step}, train_rewards=[0.5]))


def test_the_newest_are_kept_and_restore_what_was_saved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 100):
        save(checkpoints, step)
    assert [path.name for path in checkpoints.all()] == ["step-000010", "step-000100"]
    assert checkpoints.latest() == checkpoints.path(100)
    assert read_state(checkpoints.latest()) == RunState(step=100, dropped={"ending": 100}, train_rewards=[0.5])


def evaluated(step: int, reward: float, name: str = "eval") -> dict[str, Any]:
    return {"step": step, "set": name, "mode": "greedy", "reward": reward, "rollouts": 1, "seconds": 1.0}


def test_the_best_is_kept_too(tmp_path: Path) -> None:
    checkpoints, evaluations = Checkpoints(tmp_path, keep=1), [evaluated(0, 0.9), evaluated(0, 0.9, "easy")]
    for step, reward in ((1, 0.2), (2, 0.8), (3, 0.8), (4, 0.1), (5, None)):
        if reward is not None:
            evaluations += [evaluated(step, 1 - reward, "easy"), evaluated(step, reward)]
        checkpoints.commit(checkpoints.begin(step), RunState(step=step, evaluations=list(evaluations)))
    assert [path.name for path in checkpoints.all()] == ["step-000003", "step-000005"]


def test_a_removal_that_is_cut_off_leaves_no_checkpoint_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    monkeypatch.setattr("shutil.rmtree", lambda path, **_: (path / "weights").unlink(missing_ok=True))
    save(checkpoints, 2)
    assert checkpoints.all() == [checkpoints.path(2)]


def test_a_checkpoint_that_was_not_finished_does_not_exist(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 5)
    (checkpoints.begin(10) / "weights").write_text("half")
    assert checkpoints.latest() == checkpoints.path(5)
    assert (save(checkpoints, 10) / "weights").read_text() == "10"


def test_a_link_leads_to_the_latest_weights_also_after_the_run_was_moved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    for step in (5, 10):
        part = checkpoints.begin(step)
        (part / "default" / "model").mkdir(parents=True)
        (part / "default" / "model" / "config.json").write_text(str(step))
        checkpoints.commit(part, RunState(step=step))
        assert (run / "model" / "config.json").read_text() == str(step)
    assert model_links(checkpoints.latest()) == {run / "model": checkpoints.path(10) / "default" / "model"}

    run.rename(tmp_path / "moved")

    assert (tmp_path / "moved" / "model" / "config.json").read_text() == "10"


def test_of_several_policies_each_has_a_link(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    part = checkpoints.begin(1)
    for policy in ("writer", "critic"):
        (part / policy / "model").mkdir(parents=True)
        (part / policy / "model" / "config.json").write_text(policy)
    checkpoints.commit(part, RunState(step=1))

    assert (tmp_path / "model-writer" / "config.json").read_text() == "writer"
    assert (tmp_path / "model-critic" / "config.json").read_text() == "critic"


def test_what_stands_in_the_way_of_a_link_is_told_and_costs_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model" / "mine").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    part = checkpoints.begin(1)
    (part / "default" / "model").mkdir(parents=True)

    assert checkpoints.commit(part, RunState(step=1)).is_dir()

    assert f"{tmp_path / 'model'} cannot be made a link to the weights in" in caplog.text
    assert (tmp_path / "model" / "mine").is_dir()


@pytest.mark.parametrize(("run", "folder", "file"), [(0o755, 0o755, 0o644), (0o700, 0o700, 0o600)])
def test_weights_can_be_read_by_those_who_can_read_the_run(tmp_path: Path, run: int, folder: int, file: int) -> None:
    tmp_path.chmod(run)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    part = checkpoints.begin(1)
    (part / "default").mkdir(mode=0o700)
    for name, mode in (("ours", 0o600), ("everybodys", 0o666)):
        (part / "default" / name).touch()
        (part / "default" / name).chmod(mode)

    whole = checkpoints.commit(part, RunState(step=1))

    modes = {path.name: path.stat().st_mode & 0o777 for path in whole.rglob("*")}
    assert modes == {"default": folder, "ours": file, "everybodys": file, "state.json": file, "SHA256SUMS": file}


def test_transitions_dropped_for_the_typed_reasons_are_saved(tmp_path: Path) -> None:
    state = RunState(step=1)
    for count in (2, 3):
        state.count_dropped({DropReason.UNTRAINED_AGENT: count})
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.commit(checkpoints.begin(1), state)
    assert read_state(checkpoints.latest()).dropped == {"untrained_agent": 5}


def test_nothing_to_resume_from_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        Checkpoints(tmp_path, keep=2).latest()
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state(tmp_path)


@pytest.fixture
def saved(tmp_path: Path) -> list[Path]:
    """Two checkpoints with files in folders, the older one first."""
    checkpoints, found = Checkpoints(tmp_path, keep=2), []
    for step in (5, 10):
        part = checkpoints.begin(step)
        (part / "default" / "model").mkdir(parents=True)
        (part / "default" / "trainer.pt").write_bytes(random.Random(step).randbytes(10_000))
        (part / "default" / "model" / "model.safetensors").write_bytes(random.Random(-step).randbytes(50_000))
        found.append(checkpoints.commit(part, RunState(step=step)))
    return found


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="coreutils are not installed")
def test_every_file_has_a_digest_that_sha256sum_agrees_with(saved: list[Path]) -> None:
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=saved[1], capture_output=True, text=True, check=True
    )

    assert checked.stdout.splitlines() == [
        "default/model/model.safetensors: OK", "default/trainer.pt: OK", "state.json: OK",
    ]  # fmt: skip
    assert verify(saved[1])


@pytest.mark.parametrize("name", ["default/model/model.safetensors", "default/trainer.pt", "state.json"])
def test_a_damaged_file_is_named_with_both_digests_and_an_earlier_checkpoint(saved: list[Path], name: str) -> None:
    file = saved[1] / name
    expected, content = hashlib.sha256(file.read_bytes()).hexdigest(), bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4000] = random.Random(1).randbytes(4000)
    file.write_bytes(content)

    with pytest.raises(CheckpointError) as raised:
        verify(saved[1])

    said = str(raised.value)
    assert str(file) in said
    assert expected in said
    assert hashlib.sha256(content).hexdigest() in said
    assert f"agl train --resume {saved[0]}." in said


def test_a_file_that_is_gone_is_named_and_without_an_earlier_checkpoint_the_remedy_is_another(
    saved: list[Path],
) -> None:
    (saved[0] / "default" / "trainer.pt").unlink()

    with pytest.raises(CheckpointError, match=r"trainer\.pt is damaged.*No such file.*there is no earlier one"):
        verify(saved[0])


def test_a_checkpoint_without_digests_is_told_from_a_good_one(saved: list[Path]) -> None:
    (saved[1] / "SHA256SUMS").unlink()

    assert not verify(saved[1])


def test_files_and_folders_are_on_the_disk_before_the_checkpoint_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync of each inode before the rename, and of the folder that has the name after it."""
    done: list[object] = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda opened: (done.append(os.fstat(opened).st_ino), sync(opened)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("renamed"), rename(old, new)))
    checkpoints = Checkpoints(tmp_path, keep=1)
    part = checkpoints.begin(1)
    (part / "default").mkdir()
    (part / "default" / "weights").write_text("1")

    checkpoint = checkpoints.commit(part, RunState(step=1))

    renamed = done.index("renamed")
    inside = {path.stat().st_ino for path in (checkpoint, *checkpoint.rglob("*"))}
    assert len(inside) == 5  # the folder, default/, weights, state.json and SHA256SUMS
    assert inside <= set(done[:renamed])
    assert tmp_path.stat().st_ino in done[renamed:]


def test_a_checkpoint_that_cannot_be_written_says_so_and_keeps_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)

    def fails(opened: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(CheckpointError, match=r"step-000002 cannot be written.*No space left.*resume the run"):
        save(checkpoints, 2)
    assert checkpoints.all() == [checkpoints.path(1)]


def test_resuming_takes_out_the_metrics_of_later_steps(tmp_path: Path) -> None:
    logged: list[tuple[int, dict[str, float]]] = []

    class Tracker:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            logged.append((step, dict(metrics)))

        def close(self) -> None: ...

    path = tmp_path / "metrics.jsonl"
    log, before = MetricsLog(path, {"mine": Tracker()}), time.time()
    for step in range(4):
        log.write(step, "train", {"reward/mean": step / 10})
    MetricsLog(path, {}, restart=1).forget_after(1)
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert before <= lines[0]["time"] <= lines[1]["time"] <= time.time()
    assert lines[1] == {"step": 1, "kind": "train", "restart": 0, "time": lines[1]["time"], "reward/mean": 0.1}
    assert logged[3] == (3, {"train/reward/mean": 0.3})
    log.write(3, "eval", {"eval/greedy/reward/mean": 0.5})
    assert logged[4] == (3, {"eval/greedy/reward/mean": 0.5})


def test_a_checkpoint_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot be written \(.*Not a directory: .*checkpoints"):
        Checkpoints(tmp_path / "checkpoints", keep=2).begin(1)


def test_a_tracker_that_raises_is_reported_once_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logged: list[int] = []

    class Tracker:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            logged.append(step)
            if step == 1:
                raise ConnectionError("no route to the tracker")

        def close(self) -> None:
            raise ConnectionError("no route to the tracker")

    log = MetricsLog(tmp_path / "metrics.jsonl", {"remote": Tracker(), "other": Tracker()})
    for step in range(3):
        log.write(step, "train", {"loss": 0.5})
    log.close()

    assert logged == [0, 0, 1, 1, 2, 2]
    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) == 3
    assert [record.getMessage().splitlines()[0] for record in caplog.records] == [
        f"The tracker '{name}' failed (ConnectionError: no route to the tracker). Training goes on, and the tracker is "
        f"given what comes later; what it misses is in {tmp_path / 'metrics.jsonl'}."
        for name in ("remote", "other")
    ]


def test_a_line_of_metrics_that_was_cut_off_does_not_keep_a_run_from_resuming(tmp_path: Path) -> None:
    """By a kill or a full disk: it is the last one, at any of its bytes. Another one is somebody's mistake."""
    path = tmp_path / "metrics.jsonl"
    for step in range(3):
        MetricsLog(path, {}).write(step, "train", {"loss": 0.5})
    whole = path.read_bytes()
    kept = b"".join(whole.splitlines(keepends=True)[:2])
    for end in range(len(kept) + 1, len(whole)):
        path.write_bytes(whole[:end])
        MetricsLog(path, {}, restart=1).forget_after(1)
        assert path.read_bytes() == kept, whole[:end]

    for broken in (b'{"step":1', b"{}", b"[]", b"3", b""):
        content = kept + broken + b"\n" + kept
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"Line 3 of {path}"):
            MetricsLog(path, {}, restart=1).forget_after(1)
        assert path.read_bytes() == content
