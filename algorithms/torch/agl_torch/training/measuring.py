"""What an update measures while it works: means over optimizer steps, seconds by phase, the share done."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor

from agl_core.protocols import Progress
from agl_torch.training.optimizer import StepReport

BACKWARD_COST = 2.0
"""A backward pass takes about as long as two forward passes; for the progress bar."""


class StepSums:
    """Sums over the micro-batches of one optimizer step."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.values: dict[str, float] = {}

    def add(self, weights_R: Tensor, measured: Mapping[str, Tensor]) -> None:
        """One micro-batch: its token weights, and sums over tokens of weight × value (of `…_max`: the largest)."""
        self.weight += float(weights_R.sum())
        for name, tensor in measured.items():
            value = tensor.detach().item()
            self.values[name] = (
                max(self.values.get(name, value), value)
                if name.endswith("_max")
                else (self.values.get(name, 0.0) + value)
            )


class Meter:
    """Gathers the metrics of an update's optimizer steps."""

    def __init__(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        self._steps: list[StepSums] = []
        self._grad_norms: list[float] = []
        self._skipped = 0

    def begin(self) -> StepSums:
        return StepSums()

    def skip(self) -> None:
        """The loss was not finite."""
        self._skipped += 1

    def end(self, sums: StepSums, report: StepReport) -> None:
        """The gradient is complete; the optimizer stepped, or skipped a gradient that was not finite."""
        if not report.applied:
            self._skipped += 1
            return
        self._learning_rate = report.learning_rate
        self._steps.append(sums)
        self._grad_norms.append(report.grad_norm)

    def metrics(self) -> dict[str, float]:
        """Means over the tokens of the steps that were applied, by weight, and maxima; the norm's mean over steps."""
        metrics: dict[str, float] = {}
        applied = len(self._steps)
        if applied:
            weight = sum(step.weight for step in self._steps)
            for name in self._steps[0].values:
                values = [step.values[name] for step in self._steps]
                metrics[name] = max(values) if name.endswith("_max") else sum(values) / weight
            metrics["grad_norm"] = sum(self._grad_norms) / applied
        return metrics | {
            "learning_rate": self._learning_rate,
            "steps_applied": float(applied),
            "steps_skipped": float(self._skipped),
        }


class Work:
    """How far an update is, and how long its phases took."""

    def __init__(self, progress: Progress | None) -> None:
        self.total = 0.0
        """Tokens × cost of the whole update."""
        self._progress = progress
        self.done = 0.0
        """Tokens × cost so far."""
        self._started = self._lap_started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def advance(self, tokens: int, cost: float) -> None:
        """`tokens` went through a pass that costs `cost` times a forward pass."""
        self.done += tokens * cost
        if self._progress is not None:
            self._progress(min(1.0, self.done / self.total))

    def finish(self) -> None:
        if self._progress is not None:
            self._progress(1.0)

    def lap(self, phase: str) -> None:
        """A phase, or another part of it, ended."""
        now = time.perf_counter()
        name = f"seconds_{phase}"
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._lap_started
        self._lap_started = now

    def seconds(self) -> dict[str, float]:
        return self._seconds | {"seconds_update": time.perf_counter() - self._started}
