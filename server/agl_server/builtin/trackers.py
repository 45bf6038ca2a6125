"""The trackers "mlflow" and "wandb" (Weights & Biases): metrics, configuration and the best rollouts."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
import tomllib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agl_core import private
from agl_core.config.load import CONFIG_FILE
from agl_core.errors import PluginError
from agl_core.kinds import NoOptions
from agl_core.types import Json

_STRANGE = re.compile(r"[^\w\-. :/]")


class LazyTracker(ABC):
    """Opens the tracker's run when there is something to log, so that training begins without it.

    If that fails, the error is raised once, and whatever comes later is ignored: each further try could take long.
    """

    module: str
    """The tracker's package, which is also the name of its extra."""

    def __init__(self, options: NoOptions, run_dir: Path) -> None:
        """PluginError with the remedy if the package is missing."""
        if importlib.util.find_spec(self.module) is None:
            raise PluginError(
                f"The tracker '{self.module}' needs the package {self.module}: "
                f"pip install 'agl-server[{self.module}]', or leave it out (--set trackers.{self.module}=false)."
            )
        self.run_dir = run_dir
        self.opened: Any = None
        self._tried = False

    def open(self) -> Any:
        """The tracker's run; None if it could not be opened."""
        if not self._tried:
            self._tried = True
            file = self.run_dir / f"{self.module}-run"  # The id there, for a resumed run.
            config = tomllib.loads((self.run_dir / CONFIG_FILE).read_text())
            self.opened, id = self._open(file.read_text().strip() or None if file.exists() else None, config)
            private.write(file, id)
        return self.opened

    @abstractmethod
    def _open(self, id: str | None, config: Mapping[str, Any]) -> tuple[Any, str]:
        """Begin the tracker's run, or go on with that of this id; with its id."""


class MlflowTracker(LazyTracker):
    """Opened, it is MLflow's client, which cuts what is too long or too much for one request, and the run's id."""

    module = "mlflow"

    def __init__(self, options: NoOptions, run_dir: Path) -> None:
        super().__init__(options, run_dir)
        self._uri = os.environ.get("MLFLOW_TRACKING_URI")

    def _open(self, id: str | None, config: Mapping[str, Any]) -> tuple[tuple[Any, str], str]:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri, folder = self._uri, self.run_dir.resolve()
        client = MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        if id is not None:
            client.update_run(id, status="RUNNING")
            return (client, id), id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "agl")
        known = client.get_experiment_by_name(name)
        artifacts = None if uri else (folder / "mlflow").as_uri()
        experiment = known.experiment_id if known else client.create_experiment(name, artifacts)
        id = str(client.create_run(experiment, run_name=self.run_dir.name).info.run_id)
        client.log_batch(id, params=[Param(_named(key), text) for key, text in flat(config).items()])
        return (client, id), id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        if (opened := self.open()) is None:
            return
        (client, id), now = opened, int(time.time() * 1000)
        client.log_batch(id, [Metric(_named(key), value, now, step) for key, value in metrics.items()])

    def keep(self, step: int, best: Sequence[Mapping[str, Json]]) -> None:
        """A table of rollouts."""
        if (opened := self.open()) is not None:
            client, id = opened
            table = {"columns": list(best[0]), "data": [list(rollout.values()) for rollout in best]}
            client.log_dict(id, table, f"best_rollouts/step-{step:06d}.json")

    def close(self) -> None:
        if self.opened is not None:
            client, id = self.opened
            client.set_terminated(id)


def _named(key: str) -> str:
    """A name that MLflow takes.

    >>> _named("reward/100%")
    'reward/100_'
    """
    return _STRANGE.sub("_", key)[:250]


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """A configuration as texts by dotted key.

    >>> flat({"train": {"steps": 4}})
    {'train.steps': '4'}
    """
    texts: dict[str, str] = {}
    for key, value in config.items():
        name = f"{above}.{key}" if above else key
        texts |= flat(value, name) if isinstance(value, Mapping) else {name: str(value)}
    return texts


class WandbTracker(LazyTracker):
    """Opened, it is W&B's run. Project, key, server and mode are W&B's own: WANDB_PROJECT, WANDB_API_KEY, …"""

    module = "wandb"

    def _open(self, id: str | None, config: Mapping[str, Any]) -> tuple[Any, str]:
        import wandb

        id = id or uuid.uuid4().hex[:12]
        run = wandb.init(
            id=id,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "agl"),
            name=self.run_dir.name,
            dir=str(self.run_dir),
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run, id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if (run := self.open()) is not None:
            run.log({**metrics, "step": step})

    def keep(self, step: int, best: Sequence[Mapping[str, Json]]) -> None:
        """A table of rollouts."""
        import wandb

        if (run := self.open()) is not None:
            rows = [[_cell(value) for value in rollout.values()] for rollout in best]
            run.log({"best_rollouts": wandb.Table(columns=list(best[0]), data=rows), "step": step})

    def close(self) -> None:
        if self.opened is not None:
            self.opened.finish()


def _cell(value: Json) -> Any:
    return value if isinstance(value, str | int | float | None) else json.dumps(value, ensure_ascii=False)
