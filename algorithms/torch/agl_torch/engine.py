"""The run's side of the torch engine: `agl_torch.process` holds the weights.

Imports no torch: a run's own process stays small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from agl_core.engines.host import ProcessEngine
from agl_core.types import Batch
from agl_core.types.estimates import Needs, Workload
from agl_core.types.recorded import RecordedReply, TokenizedReply
from agl_torch.options import TorchOptions

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

    @property
    def seconds_to_start(self) -> float:
        return self._options.start_timeout

    async def estimate(self, work: Workload) -> Needs:
        """What a run would take; see `agl_core.protocols.EstimatingEngine`."""
        return await self._estimate(work)

    async def tokenize(self, policy: str, replies: Sequence[RecordedReply]) -> Sequence[TokenizedReply | None]:
        """The token ids of recorded replies; see `agl_core.protocols.TokenizingEngine`."""
        return await self._tokenize(policy, replies)

    async def logprobs(self, policy: str, batch: Batch) -> NDArray[np.float64]:
        """How probable recorded replies are now; see `agl_core.protocols.ScoringEngine`."""
        return await self._logprobs(policy, batch)

    def remedy(self, lines: Sequence[str], exit_code: int | None) -> str | None:
        if exit_code != KILLED:
            return None
        return "Memory may have run out: lower engine.torch.tokens_per_micro_batch or cache_mib."
