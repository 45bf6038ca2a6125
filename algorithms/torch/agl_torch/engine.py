"""The run's side of the torch engine: `agl_torch.process` holds the weights.

Imports no torch: a run's own process stays small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from agl_core.training.host import ProcessEngine
from agl_torch.plugin import TorchOptions

KILLED = -9


class TorchEngine(ProcessEngine[TorchOptions]):
    """One process that samples from and trains every policy; see `agl_core.protocols.Engine`.

    engine = TorchEngine(TorchOptions(), context)
    upstream = await engine.start()
    result = await engine.update("default", batch, "grpo", {})
    await engine.stop()
    """

    module = "agl_torch.process"
    environment: ClassVar[Mapping[str, str]] = {"OMP_WAIT_POLICY": "PASSIVE"}
    """Threads of torch that wait for each other leave their cores to the agents and the server."""

    # Its process does all that these ask for.
    estimate, tokenize, logprobs = ProcessEngine._estimate, ProcessEngine._tokenize, ProcessEngine._logprobs

    def remedy(self, lines: Sequence[str], exit_code: int | None) -> str | None:
        if exit_code != KILLED:
            return None
        return "Memory may have run out: lower engine.torch.tokens_per_micro_batch or cache_mib."
