"""The core's own components, registered through the same hook as any plugin's."""

from __future__ import annotations

from agl_core import kinds
from agl_core.builtin.credit import discounted, identical, immediate, stepwise
from agl_core.hooks import hookimpl
from agl_core.kinds import Register

__all__ = ["discounted", "identical", "immediate", "register_components", "stepwise"]
# Credit rules are made by a decorator: being here is all it takes, as in a user's own file.


@hookimpl
def register_components(register: Register) -> None:
    """Buffers, the store that needs no server, tasks of files and of other runs, and trackers that are extras."""
    from agl_core.builtin.buffers import PRIORITISED_NEEDS, Fifo, Prioritised, PrioritisedOptions
    from agl_core.builtin.recorded import RecordedOptions, recorded, recorded_needs
    from agl_core.builtin.tasks import (
        DatasetOptions,
        FileOptions,
        csv_tasks,
        dataset_tasks,
        jsonl_tasks,
    )
    from agl_core.builtin.trackers import MlflowOptions, MlflowTracker, WandbTracker
    from agl_core.store.sqlite import build

    register(kinds.BUFFER, "fifo", lambda options: Fifo(), doc=Fifo.__doc__)
    register(kinds.BUFFER, "prioritised", Prioritised, options=PrioritisedOptions, needs=PRIORITISED_NEEDS)
    register(kinds.STORE, "sqlite", build)
    register(kinds.TASK_SOURCE, "jsonl", jsonl_tasks, options=FileOptions)
    register(kinds.TASK_SOURCE, "csv", csv_tasks, options=FileOptions)
    register(kinds.TASK_SOURCE, "hf", dataset_tasks, options=DatasetOptions)
    register(kinds.TASK_SOURCE, "recorded", recorded, options=RecordedOptions, needs=recorded_needs)
    wandb, mlflow = "Weights & Biases: pip install 'agl-core[wandb]'.", "MLflow: pip install 'agl-core[mlflow]'."
    register(kinds.TRACKER, "wandb", WandbTracker, doc=wandb)
    register(kinds.TRACKER, "mlflow", MlflowTracker, options=MlflowOptions, doc=mlflow)
