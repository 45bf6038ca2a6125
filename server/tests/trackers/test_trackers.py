"""The trackers of other makers with their own packages: what they get, resuming, and what happens if they fail."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from agl_core.errors import PluginError
from agl_core.kinds import NoOptions
from agl_core.testing import episodes as make
from agl_server.builtin.trackers import MlflowTracker, WandbTracker
from agl_server.training.metrics import MetricsLog

pytest.importorskip("wandb", reason="their packages are large: make trackers installs them and runs this")
pytest.importorskip("mlflow", reason="their packages are large: make trackers installs them and runs this")

CONFIG = {"name": "calc", "train": {"steps": 4}}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "calc"
    folder.mkdir()
    (folder / "config.toml").write_text(tomli_w.dumps(CONFIG))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield folder
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()  # It remembers its mode for the rest of the process.


def log_two_steps(run_dir: Path, trackers: dict[str, Any], first: int = 1) -> None:
    """Log two steps, an evaluation and a checkpoint, as a run does."""
    log = MetricsLog(run_dir / "metrics.jsonl", trackers)
    log.write(first, "train", {"reward/mean": 0.25, "reward/100%": 1.0})
    log.write(first + 1, "train", {"reward/mean": 0.5})
    log.write(first + 1, "eval", {"eval/greedy/reward/mean": 0.75})
    episodes = [make.episode(rollout=f"r{n}", terminal=float(n), result={"said": n}) for n in range(12)]
    log.keep(first + 1, episodes)
    log.close()


def check_mlflow(uri: str, run_id: str, steps: list[int], downloaded: Path) -> None:
    """Compare what was logged, as MLflow's own client reads it."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    history = client.get_metric_history(run_id, "train/reward/mean")
    assert [metric.step for metric in history] == steps
    run = client.get_run(run_id)
    assert run.data.params["train.steps"] == "4"
    assert run.data.metrics["eval/greedy/reward/mean"] == 0.75
    assert run.info.status == "FINISHED"
    best = client.download_artifacts(run_id, "best_rollouts/step-000002.json", str(downloaded))
    table = json.loads(Path(best).read_text())
    assert table["columns"] == ["rollout", "reward", "ending", "task", "result"]
    assert [row[0] for row in table["data"]] == [f"r{n}" for n in range(11, 1, -1)]


def test_mlflow_in_a_file_and_a_resumed_run_goes_on(run_dir: Path, tmp_path: Path) -> None:
    log_two_steps(run_dir, {"mlflow": MlflowTracker(NoOptions(), run_dir)})
    log_two_steps(run_dir, {"mlflow": MlflowTracker(NoOptions(), run_dir)}, first=3)
    (tmp_path / "got").mkdir()
    run_id = (run_dir / "mlflow-run").read_text()
    check_mlflow(f"sqlite:///{run_dir / 'mlflow.db'}", run_id, [1, 2, 3, 4], tmp_path / "got")


def test_wandb_offline_and_a_resumed_run_goes_on(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    options = NoOptions()
    log_two_steps(run_dir, {"wandb": WandbTracker(options, run_dir)})
    log_two_steps(run_dir, {"wandb": WandbTracker(options, run_dir)}, first=3)
    run_id = (run_dir / "wandb-run").read_text()
    files = sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    assert b"train/reward/mean" in files[0].read_bytes()
    assert b"best_rollouts" in files[0].read_bytes()


@pytest.mark.parametrize("which", ["wandb", "mlflow"])
def test_without_key_or_network_it_is_reported_once_and_training_goes_on(
    run_dir: Path, which: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("WANDB_MODE", "online")
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        tracker = (WandbTracker if which == "wandb" else MlflowTracker)(NoOptions(), run_dir)
    other = MlflowTracker(NoOptions(), run_dir)
    with caplog.at_level(logging.WARNING, logger="agl_server"):
        log_two_steps(run_dir, {which: tracker, "other": other})
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("agl_server")]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"The tracker '{which}' failed")
    assert len((run_dir / "metrics.jsonl").read_bytes().splitlines()) == 3
    assert (run_dir / "mlflow.db").exists(), "the other one got everything"


def test_a_package_that_is_missing_is_named_with_its_extra(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WandbTracker, "module", "no_such_package_at_all")
    with pytest.raises(PluginError, match=r"pip install 'agl-server\[no_such_package_at_all\]'"):
        WandbTracker(NoOptions(), run_dir)
