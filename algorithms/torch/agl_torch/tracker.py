"""Metrics for TensorBoard, written without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoardTracker:
    """Writes every metric as a scalar to `RUN/tensorboard`; look with `tensorboard --logdir RUN`."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.summary import Writer

        self._writer: Any = Writer(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
