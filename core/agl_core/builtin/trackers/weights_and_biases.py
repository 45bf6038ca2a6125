"""The tracker `wandb`: metrics, configuration, checkpoints and the best rollouts on Weights & Biases."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agl_core.builtin.trackers.opening import OpenedLate, check_installed, remember, remembered
from agl_core.types import Json

RUN_FILE = "wandb-run"
"""In the run's folder: the id of its run there."""


class WandbOptions(BaseModel):
    """Where the run goes. Project, key, server and mode are W&B's own: WANDB_PROJECT, WANDB_API_KEY, …"""

    model_config = ConfigDict(extra="forbid")

    checkpoints: bool = Field(True, description="Whether the weights of checkpoints are kept as artifacts.")


class WandbTracker(OpenedLate[Any]):
    """A resumed run goes on with the same run there."""

    def __init__(self, options: WandbOptions, run_dir: Path) -> None:
        super().__init__(run_dir)
        check_installed("wandb", "wandb")
        self._options = options

    def open(self) -> Any:
        import wandb

        file = self.run_dir / RUN_FILE
        id = remembered(file) or uuid.uuid4().hex[:12]
        run = wandb.init(
            id=id,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "agl"),
            name=self.run_dir.name,
            dir=str(self.run_dir),
            config=self.config,
            settings=wandb.Settings(console="off", silent=True),
        )
        remember(file, id)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if (run := self.opened) is not None:
            run.log({**metrics, "step": step})

    def keep(self, step: int, checkpoint: Path, best: Sequence[Mapping[str, Json]]) -> None:
        """A table of rollouts, and an artifact with each policy's weights."""
        import wandb

        if (run := self.opened) is None:
            return
        if best:
            rows = [[_cell(value) for value in each.values()] for each in best]
            run.log({"best_rollouts": wandb.Table(columns=list(best[0]), data=rows), "step": step})
        if self._options.checkpoints:
            artifact = wandb.Artifact(f"{run.id}-weights", type="model", metadata={"step": step})
            for model in sorted(checkpoint.glob("*/model")):
                artifact.add_dir(str(model), name=model.parent.name)
            run.log_artifact(artifact)

    def close(self) -> None:
        if self.is_open and (run := self.opened) is not None:
            run.finish()


def _cell(value: Json) -> Any:
    return value if isinstance(value, str | int | float | None) else json.dumps(value, ensure_ascii=False)
