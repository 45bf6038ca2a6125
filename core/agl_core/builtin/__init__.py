"""What the core itself brings, through the same hooks as any plugin."""

from __future__ import annotations

from agl_core.builtin.credit import discounted, identical, immediate, stepwise
from agl_core.builtin.feedback import feedback
from agl_core.hooks import hookimpl
from agl_core.registering import RegisterBuffer, RegisterStore, RegisterTaskSource, RegisterTracker

__all__ = [
    "discounted",
    "feedback",
    "identical",
    "immediate",
    "register_buffers",
    "register_stores",
    "register_task_sources",
    "register_trackers",
    "stepwise",
]
# Credit and reward rules are made by a decorator: being here is all it takes, as in a user's own file.


@hookimpl
def register_buffers(register: RegisterBuffer) -> None:
    """The order of completion, without and with replay."""
    from agl_core.builtin.fifo import fifo
    from agl_core.builtin.replay import PrioritisedOptions, prioritised, prioritised_needs

    register("fifo", fifo)
    register("prioritised", prioritised, options=PrioritisedOptions, needs=prioritised_needs)


@hookimpl
def register_stores(register: RegisterStore) -> None:
    """The store that needs no server."""
    from agl_core.store.sqlite import SqliteOptions, build

    register("sqlite", build, options=SqliteOptions)


@hookimpl
def register_task_sources(register: RegisterTaskSource) -> None:
    """Tasks from files, and from other runs."""
    from agl_core.builtin.recorded import RecordedOptions, recorded, recorded_needs
    from agl_core.builtin.tables import DatasetOptions, FileOptions, csv_tasks, dataset_tasks, parquet_tasks
    from agl_core.builtin.tasks import JsonlOptions, jsonl

    register("jsonl", jsonl, options=JsonlOptions)
    register("csv", csv_tasks, options=FileOptions)
    register("parquet", parquet_tasks, options=FileOptions)
    register("hf", dataset_tasks, options=DatasetOptions)
    register("recorded", recorded, options=RecordedOptions, needs=recorded_needs)


@hookimpl
def register_trackers(register: RegisterTracker) -> None:
    """Trackers of other makers, whose packages are extras."""
    from agl_core.builtin.trackers.on_mlflow import MlflowOptions, MlflowTracker
    from agl_core.builtin.trackers.weights_and_biases import WandbOptions, WandbTracker

    register("wandb", WandbTracker, options=WandbOptions, doc="Weights & Biases: pip install 'agl-core[wandb]'.")
    register("mlflow", MlflowTracker, options=MlflowOptions, doc="MLflow: pip install 'agl-core[mlflow]'.")
