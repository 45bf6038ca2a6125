"""Transitions as a Tinker service takes them: a row of tokens for each chain, with values at its targets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tinker import Datum, ModelInput, TensorData
from torch import Tensor

from agl_algorithms.prepared import Chain, places_of
from agl_core.types import Batch


class Row:
    """The tokens of a chain of transitions, and where its response tokens stand in the batch's arrays over [R]."""

    def __init__(self, batch: Batch, chain: Chain) -> None:
        last = int(chain[-1])
        self.tokens = batch.tokens_T[batch.offsets[last] : batch.offsets[last + 1]].tolist()
        places = places_of(batch, chain)
        targets = np.full(len(self.tokens) - 1, -1, np.int64)
        targets[len(targets) - len(places) :] = places
        self.places = torch.from_numpy(targets)
        """[tokens - 1] the index in [R] of what each position predicts; -1 for what is no response."""

    def datum(self, logprobs_R: Tensor, advantages_R: Tensor, scale: float) -> Datum:
        """The row for the loss `importance_sampling`, whose gradient at ratio 1 is the advantages times `scale`."""
        return Datum(
            model_input=ModelInput.from_ints(self.tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": TensorData(data=self.tokens[1:], dtype="int64", shape=[len(self.tokens) - 1]),
                "logprobs": self._spread(logprobs_R),
                "advantages": self._spread(advantages_R * scale),
            },
        )

    def gather(self, values: Sequence[float], into_R: Tensor) -> None:
        """Put what the service computed for each target to its place."""
        known = self.places >= 0
        into_R[self.places[known]] = torch.tensor(values, dtype=into_R.dtype)[: len(known)][known]

    def _spread(self, values_R: Tensor) -> TensorData:
        values = torch.where(self.places < 0, 0.0, values_R[self.places].to(torch.float32))
        return TensorData(data=values.tolist(), dtype="float32", shape=[len(values)])
