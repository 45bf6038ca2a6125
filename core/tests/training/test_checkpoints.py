"""Checkpoints are whole or not there, and keep what should be kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from agl_core.errors import CheckpointError
from agl_core.training.checkpoints import Checkpoints, RunState, model_links, read_state


def save(checkpoints: Checkpoints, step: int, *policies: str, **state: Any) -> Path:
    part = checkpoints.begin(step)
    (part / "weights").write_text(str(step))
    for policy in policies:
        (part / policy / "model").mkdir(parents=True)
        (part / policy / "model" / "config.json").write_text(f"{policy} {step}")
    return checkpoints.commit(part, RunState(step=step, **state))


def test_the_newest_are_kept_and_restore_what_was_saved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 100):
        save(checkpoints, step, groups_unfinished=[step])
    assert [path.name for path in checkpoints.all()] == ["step-000010", "step-000100"]
    assert read_state(checkpoints.latest()) == RunState(step=100, groups_unfinished=[100])


def test_the_best_and_the_stable_ones_are_kept_too(tmp_path: Path) -> None:
    def evaluated(step: int, reward: float, name: str = "eval") -> dict[str, Any]:
        return {"step": step, "set": name, "mode": "greedy", "reward": reward, "rollouts": 1, "seconds": 1.0}

    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    evaluations = [evaluated(0, 0.9), evaluated(0, 0.9, "easy")]
    for step, reward in ((1, 0.2), (2, 0.8), (3, 0.8), (4, 0.1), (5, None)):
        if reward is not None:
            evaluations += [evaluated(step, 1 - reward, "easy"), evaluated(step, reward)]
        save(checkpoints, step, evaluations=list(evaluations))
    assert [path.name for path in checkpoints.all()] == ["step-000003", "step-000005"]
    checkpoints.mark_stable("default", 5)
    save(checkpoints, 6)
    assert [path.name for path in checkpoints.all()] == ["step-000003", "step-000005", "step-000006"]
    assert checkpoints.stable() == {"default": 5}
    (tmp_path / "stable.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"stable.json cannot be read"):
        checkpoints.stable()


def test_what_is_cut_off_leaves_no_checkpoint_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    (checkpoints.begin(2) / "weights").write_text("half")
    assert checkpoints.all() == [checkpoints.path(1)]
    monkeypatch.setattr("shutil.rmtree", lambda path, **_: (path / "weights").unlink(missing_ok=True))
    save(checkpoints, 3)
    assert checkpoints.all() == [checkpoints.path(3)]


def test_links_lead_to_the_latest_weights_also_after_the_run_was_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    for step in (5, 10):
        save(checkpoints, step, "default")
        assert (run / "model" / "config.json").read_text() == f"default {step}"
    assert model_links(checkpoints.latest()) == {run / "model": checkpoints.path(10) / "default" / "model"}
    (run / "model-critic" / "mine").mkdir(parents=True)
    save(checkpoints, 11, "writer", "critic")
    assert f"{run / 'model-critic'} cannot be made a link to the weights in" in caplog.text
    assert (run / "model-critic" / "mine").is_dir()

    run.rename(tmp_path / "moved")

    assert (tmp_path / "moved" / "model-writer" / "config.json").read_text() == "writer 11"


def test_nothing_to_resume_from_says_what_to_do(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoints.latest()
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state(tmp_path)
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot be written \(.*Not a directory: .*checkpoints"):
        checkpoints.begin(1)


def test_files_and_folders_are_on_the_disk_before_the_checkpoint_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync of each inode before the rename, and of the folder that has the name after it."""
    done: list[object] = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda opened: (done.append(os.fstat(opened).st_ino), sync(opened)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("renamed"), rename(old, new)))

    checkpoint = save(Checkpoints(tmp_path, keep=1), 1, "default")

    renamed = done.index("renamed")
    inside = {path.stat().st_ino for path in (checkpoint, *checkpoint.rglob("*"))}
    assert len(inside) == 6  # the checkpoint, two folders in it, and three files
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
