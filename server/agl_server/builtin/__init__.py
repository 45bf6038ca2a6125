"""The server's own components: buffers, the store, tasks of files and of other runs, trackers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from agl_core import kinds
from agl_core.config.models import MixtureOptions
from agl_core.hooks import hookimpl
from agl_core.kinds import Capability, Register
from agl_core.types import Episode


class Fifo:
    """Groups in the order in which they were completed, each for one update.

    It is as on-policy as the run allows: with `async.max_staleness = 0` an update gets what the weights that it
    changes have sampled.
    """

    def __init__(self) -> None:
        self._groups: deque[Sequence[Episode]] = deque()

    @property
    def pending(self) -> list[str]:
        return [group[0].group for group in self._groups]

    def add(self, group: Sequence[Episode]) -> None:
        self._groups.append(group)

    def draw(self, count: int) -> list[Sequence[Episode]] | None:
        """The first `count` groups, or None if there are fewer."""
        if len(self._groups) < count:
            return None
        return [self._groups.popleft() for _ in range(count)]


@hookimpl
def register_components(register: Register) -> None:
    """Bring each; trackers need the packages of their extras."""
    from agl_server.builtin import tasks, trackers
    from agl_server.store.sqlite import build

    def recorded_needs(options: tasks.RecordedOptions) -> set[Capability]:
        return {Capability.RECORDED_TEXTS} if options.without_logprobs else set()

    register(kinds.BUFFER, "fifo", lambda options: Fifo(), doc=Fifo.__doc__)
    register(kinds.STORE, "sqlite", build)
    register(kinds.TASK_SOURCE, "jsonl", tasks.jsonl_tasks, options=tasks.FileOptions)
    register(kinds.TASK_SOURCE, "csv", tasks.csv_tasks, options=tasks.FileOptions)
    register(kinds.TASK_SOURCE, "hf", tasks.dataset_tasks, options=tasks.DatasetOptions)
    register(kinds.TASK_SOURCE, "mixture", tasks.Mixture, options=MixtureOptions)
    recorded, demonstrations = tasks.RecordedOptions, {Capability.DEMONSTRATIONS}
    register(
        kinds.TASK_SOURCE, "recorded", tasks.Recorded, options=recorded, needs=recorded_needs, provides=demonstrations
    )
    wandb, mlflow = "Weights & Biases: pip install 'agl-server[wandb]'.", "MLflow: pip install 'agl-server[mlflow]'."
    register(kinds.TRACKER, "wandb", trackers.WandbTracker, doc=wandb)
    register(kinds.TRACKER, "mlflow", trackers.MlflowTracker, options=trackers.MlflowOptions, doc=mlflow)
