"""New weights for vLLM on a CPU: the part that runs in vLLM's own worker process."""

from __future__ import annotations

import torch
from torch import Tensor
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CpuWorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Takes over all weights at once, as vLLM reloads a checkpoint: that restores the loaders that repacking took."""

    def update_weights_from_ipc(
        self, peft_config: object = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Called by veRL on every exchange of weights."""
        if peft_config is not None and base_sync_done:
            raise NotImplementedError("An adapter came unmerged. agl merges it before each exchange (lora.merge).")
        self.device = torch.device("cpu")
        received: list[tuple[str, Tensor]] = []

        def take(weights: list[tuple[str, Tensor]], last: bool) -> None:
            # Copied: on a CPU they are views of shared memory, which is closed afterwards.
            received.extend((name, tensor.clone()) for name, tensor in weights)

        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=take)
        self.reload_weights(weights_iterator=iter(received))
