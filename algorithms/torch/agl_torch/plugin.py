"""What this package registers. Importing it imports no torch; nor does a run that uses the engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agl_core import Capability, hookimpl, kinds
from agl_core.kinds import NoOptions, Register
from agl_torch.options import TorchOptions

if TYPE_CHECKING:
    from agl_core.protocols import Engine, EngineContext, Tracker


def build_engine(options: TorchOptions, context: EngineContext) -> Engine:
    """One set of weights that samples and trains, in a process of its own on this machine."""
    from agl_torch.engine import TorchEngine

    return TorchEngine(options, context)


def build_tensorboard(options: NoOptions, run_dir: Path) -> Tracker:
    """Metrics for TensorBoard, in the run's folder."""
    from agl_torch.tracker import TensorBoardTracker

    return TensorBoardTracker(run_dir)


@hookimpl
def register_components(register: Register) -> None:
    register(
        kinds.ENGINE,
        "torch",
        build_engine,
        options=TorchOptions,
        provides={
            Capability.TOKEN_IDS,
            Capability.REFERENCE,
            Capability.CRITIC,
            Capability.POLICIES,
            Capability.RECORDED_TEXTS,
        },
    )
    register(kinds.TRACKER, "tensorboard", build_tensorboard)
