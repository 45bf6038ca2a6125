"""Checkpoints are whole or not there, and metrics of superseded steps go."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from agl_core.errors import CheckpointError
from agl_core.training.checkpoints import Checkpoints, RunState, read_state
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


def test_a_checkpoint_that_was_not_finished_does_not_exist(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 5)
    (checkpoints.begin(10) / "weights").write_text("half")
    assert checkpoints.latest() == checkpoints.path(5)
    assert (save(checkpoints, 10) / "weights").read_text() == "10"


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


def test_resuming_takes_out_the_metrics_of_later_steps(tmp_path: Path) -> None:
    logged: list[tuple[int, dict[str, float]]] = []

    class Tracker:
        def log(self, step: int, metrics: dict[str, float]) -> None:
            logged.append((step, dict(metrics)))

        def close(self) -> None: ...

    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, [Tracker()], incarnation=0)  # type: ignore[list-item]
    for step in range(4):
        log.write(step, "train", {"reward/mean": step / 10})
    MetricsLog(path, [], incarnation=1).forget_after(1)
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert lines[1] == {"step": 1, "kind": "train", "incarnation": 0, "reward/mean": 0.1}
    assert logged[3] == (3, {"train/reward/mean": 0.3})


def test_a_line_of_metrics_that_was_cut_off_does_not_keep_a_run_from_resuming(tmp_path: Path) -> None:
    """By a kill or a full disk: it is the last one, at any of its bytes. Another one is somebody's mistake."""
    path = tmp_path / "metrics.jsonl"
    for step in range(3):
        MetricsLog(path, [], incarnation=0).write(step, "train", {"loss": 0.5})
    whole = path.read_bytes()
    kept = b"".join(whole.splitlines(keepends=True)[:2])
    for end in range(len(kept) + 1, len(whole)):
        path.write_bytes(whole[:end])
        MetricsLog(path, [], incarnation=1).forget_after(1)
        assert path.read_bytes() == kept, whole[:end]

    for broken in (b'{"step":1', b"{}", b"[]", b"3", b""):
        content = kept + broken + b"\n" + kept
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"Line 3 of {path}"):
            MetricsLog(path, [], incarnation=1).forget_after(1)
        assert path.read_bytes() == content
