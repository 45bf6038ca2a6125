"""The package's components and settings, and the run's side of the engine: `agl_torch.process` holds the weights.

Importing it imports no torch: a run's own process stays small.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from agl_core import Capability, hookimpl, kinds
from agl_core.kinds import NoOptions, Register
from agl_server.engines.host import ProcessEngine


class TorchOptions(BaseModel):
    """Settings of the embedded engine, for all its policies."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the first CUDA GPU if there is one."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of the engine; absent: one per core, and a single one for sampling from a tiny model."""
    max_context: int | None = Field(None, ge=16)
    """Longest prompt and response together, in tokens; absent: the model's own limit, with LongRoPE its original
    one."""
    max_rows: int = Field(128, ge=1, le=4096)
    """Replies decoded at the same time, for each policy."""
    cache_mib: int | None = Field(None, ge=1)
    """Memory for keys and values of running and finished replies, in MiB; absent: what max_rows replies and as many
    finished ones may need, at most an eighth of the device's memory."""
    tokens_per_micro_batch: int | None = Field(None, ge=1)
    """Tokens, pads included, of one training pass; fewer take less memory and more time. Absent: as many as have 512
    MiB of activations and at most 1,280, on a GPU those of an eighth of its memory."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


class TensorBoardTracker:
    """Metrics for TensorBoard, in the run's folder: look with `tensorboard --logdir RUN`."""

    def __init__(self, options: NoOptions, run_dir: Path) -> None:
        from tensorboard.summary import Writer

        self._writer: Any = Writer(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class TorchEngine(ProcessEngine[TorchOptions]):
    """One set of weights that samples and trains, in a process of its own on this machine."""

    module = "agl_torch"
    environment: ClassVar[Mapping[str, str]] = {"OMP_WAIT_POLICY": "PASSIVE"}
    """Threads of torch that wait for each other leave their cores to the agents and the server."""

    def remedy(self, lines: Sequence[str], exit_code: int | None) -> str | None:
        if exit_code != -signal.SIGKILL:
            return None
        return "Memory may have run out: lower engine.torch.tokens_per_micro_batch or cache_mib."


@hookimpl
def register_components(register: Register) -> None:
    register(
        kinds.ENGINE,
        "torch",
        TorchEngine,
        options=TorchOptions,
        provides={
            Capability.TOKEN_IDS,
            Capability.REFERENCE,
            Capability.CRITIC,
            Capability.TARGET_KL,
            Capability.RESCORE,
            Capability.TEACHER,
            Capability.POLICIES,
            Capability.RECORDED_TEXTS,
        },
    )
    register(kinds.TRACKER, "tensorboard", TensorBoardTracker)
