"""The server's own components: the store, tasks of files and of other runs, trackers, the table `[prices]`."""

from __future__ import annotations

from agl_core import kinds
from agl_core.config.models import MixtureOptions
from agl_core.hooks import hookimpl
from agl_core.kinds import Capability, Register


@hookimpl
def register_components(register: Register) -> None:
    from agl_server.builtin import tasks, trackers
    from agl_server.store.sqlite import build
    from agl_server.training.metrics import Prices

    def recorded_needs(options: tasks.RecordedOptions) -> set[Capability]:
        return {Capability.RECORDED_TEXTS} if options.without_logprobs else set()

    register(kinds.STORE, "sqlite", build)
    register(kinds.TASK_SOURCE, "jsonl", tasks.jsonl_tasks, options=tasks.FileOptions)
    register(kinds.TASK_SOURCE, "csv", tasks.csv_tasks, options=tasks.FileOptions)
    register(kinds.TASK_SOURCE, "hf", tasks.dataset_tasks, options=tasks.DatasetOptions)
    register(kinds.TASK_SOURCE, "mixture", tasks.Mixture, options=MixtureOptions)
    runs, replies = tasks.RecordedOptions, {Capability.DEMONSTRATIONS}
    register(kinds.TASK_SOURCE, "recorded", tasks.RecordedRuns, options=runs, needs=recorded_needs, provides=replies)
    wandb, mlflow = "Weights & Biases: pip install 'agl-server[wandb]'.", "MLflow: pip install 'agl-server[mlflow]'."
    register(kinds.TRACKER, "wandb", trackers.WandbTracker, doc=wandb)
    register(kinds.TRACKER, "mlflow", trackers.MlflowTracker, doc=mlflow)
    register(kinds.CONFIG_TABLE, "prices", lambda options: options, options=Prices, doc=Prices.__doc__)
