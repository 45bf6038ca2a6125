"""The tracker `mlflow`: metrics, configuration, checkpoints and the best rollouts on an MLflow server or in a file."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agl_core.builtin.trackers.opening import OpenedLate, check_installed, flat, remember, remembered
from agl_core.types import Json

RUN_FILE = "mlflow-run"
"""In the run's folder: the id of its run there."""
_AT_ONCE, _PARAMETERS_AT_ONCE, _LONGEST = 1000, 100, 500
_STRANGE = re.compile(r"[^\w\-. :/]")


class MlflowOptions(BaseModel):
    """Where the run goes. Experiment, user and token are MLflow's own: MLFLOW_EXPERIMENT_NAME, …"""

    model_config = ConfigDict(extra="forbid")

    uri: str | None = Field(
        None,
        description="The tracking server (http://HOST:PORT) or file (sqlite:////PATH); absent: as MLFLOW_TRACKING_URI "
        "says, else mlflow.db in the run's folder.",
    )
    checkpoints: bool = Field(True, description="Whether the weights of checkpoints are kept as artifacts.")


@dataclass(frozen=True)
class _Run:
    client: Any
    id: str


class MlflowTracker(OpenedLate[_Run]):
    """A resumed run goes on with the same run there."""

    def __init__(self, options: MlflowOptions, run_dir: Path) -> None:
        super().__init__(run_dir)
        check_installed("mlflow", "mlflow")
        self._options = options

    def open(self) -> _Run:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = self._options.uri or os.environ.get("MLFLOW_TRACKING_URI")
        client = MlflowClient(uri or f"sqlite:///{self.run_dir.resolve() / 'mlflow.db'}")
        file = self.run_dir / RUN_FILE
        id = remembered(file)
        if id is not None:
            client.update_run(id, status="RUNNING")
            return _Run(client, id)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "agl")
        found = client.get_experiment_by_name(name)
        where = None if uri else (self.run_dir.resolve() / "mlflow").as_uri()
        experiment = found.experiment_id if found else client.create_experiment(name, where)
        run = client.create_run(experiment, run_name=self.run_dir.name)
        id = str(run.info.run_id)
        remember(file, id)
        given = [Param(_named(key), text[:_LONGEST]) for key, text in flat(self.config).items()]
        for start in range(0, len(given), _PARAMETERS_AT_ONCE):
            client.log_batch(id, params=given[start : start + _PARAMETERS_AT_ONCE])
        return _Run(client, id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        if (run := self.opened) is None:
            return
        now = int(time.time() * 1000)
        given = [Metric(_named(key), value, now, step) for key, value in metrics.items()]
        for start in range(0, len(given), _AT_ONCE):
            run.client.log_batch(run.id, metrics=given[start : start + _AT_ONCE])

    def keep(self, step: int, checkpoint: Path, best: Sequence[Mapping[str, Json]]) -> None:
        """A table of rollouts, and each policy's weights."""
        if (run := self.opened) is None:
            return
        name = f"step-{step:06d}"
        if best:
            table = {"columns": list(best[0]), "data": [list(each.values()) for each in best]}
            run.client.log_dict(run.id, table, f"best_rollouts/{name}.json")
        if self._options.checkpoints:
            for model in sorted(checkpoint.glob("*/model")):
                run.client.log_artifacts(run.id, str(model), f"checkpoints/{name}/{model.parent.name}")

    def close(self) -> None:
        if self.is_open and (run := self.opened) is not None:
            run.client.set_terminated(run.id)


def _named(key: str) -> str:
    """A name that MLflow takes.

    >>> _named("reward/100%")
    'reward/100_'
    """
    return _STRANGE.sub("_", key)[:250]
