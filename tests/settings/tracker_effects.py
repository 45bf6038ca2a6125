"""Effects of the settings of trackers, on what they ask of their packages; `core/tests/trackers` has the packages."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from typing import Any
from unittest import mock

import tomli_w

from agl_core import kinds

from .settings_bench import Bench, Effect, Given


def asked(tracker: str, modules: dict[str, mock.MagicMock]) -> Any:
    """Observes what a tracker asks of its package in a step with a checkpoint."""

    def observe(bench: Bench, given: Given) -> list[str]:
        run_dir = bench.folder / "tracked"
        (run_dir / "checkpoints" / "default" / "model").mkdir(parents=True, exist_ok=True)
        (run_dir / "config.toml").write_text(tomli_w.dumps({"name": "tracked"}))
        for file in ("wandb-run", "mlflow-run"):
            (run_dir / file).write_text("the-run")
        settings = {key.rpartition(".")[2]: value for key, value in given.items()}
        for each in modules.values():
            each.reset_mock()
            each.__spec__ = ModuleSpec("it", None)
        if tracker == "mlflow":  # It looks for its experiment in a new run alone.
            (run_dir / "mlflow-run").unlink()
        component = bench.load({}).plugins.components(kinds.TRACKER)[tracker]
        with mock.patch.dict(sys.modules, modules):  # type: ignore[arg-type]
            made = component.build(component.options(**settings), run_dir)
            made.log(1, {})
            made.keep(1, run_dir / "checkpoints", [])
        calls = [str(call) for each in modules.values() for call in each.mock_calls]
        return [call.replace(str(bench.folder), "").split(" id=")[0] for call in calls if "__" not in call]

    return observe


WANDB = {"wandb": mock.MagicMock()}
MLFLOW = {"mlflow": mock.MagicMock(), "mlflow.entities": mock.MagicMock()}

EFFECTS = {
    "tracker.wandb.checkpoints": Effect(asked("wandb", WANDB), {"tracker.wandb.checkpoints": False}),
    "tracker.mlflow.uri": Effect(asked("mlflow", MLFLOW), {"tracker.mlflow.uri": "http://127.0.0.1:5000"}),
    "tracker.mlflow.checkpoints": Effect(asked("mlflow", MLFLOW), {"tracker.mlflow.checkpoints": False}),
}
