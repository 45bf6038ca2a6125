"""How weights get to servers of their own without a GPU: a checkpoint engine of veRL's, for tests of `serving_gpus`.

They go whole through Ray's object store, which suits tiny models. veRL imports this by its name, which has to be on
PYTHONPATH, in every process that sends or receives.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
from ray.util.queue import Queue
from torch import Tensor
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("agl_cpu")
class ObjectStoreWeights(CheckpointEngine):  # type: ignore[misc]
    """The first training worker puts the weights into the store; each serving worker takes them from there."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        """`bucket_size`: unused, they go at once; `is_master`: this is the first training worker."""
        self._sends = is_master
        self._queue = Queue() if is_master else None
        """Of references to weights, one for each receiver."""
        self._receivers = 0
        self._sent: Any = None
        """The reference, until all have what it stands for."""

    def prepare(self) -> Queue | None:
        """The information of a worker that `build_topology` gets."""
        return self._queue

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Queue | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group`, for training and for serving workers: the sender's queue for all."""

        def all_of(workers: int) -> dict[str, list[Any]]:
            return {"queue": [metadata[0]] * workers, "receivers": [rollout_world_size] * workers}

        return all_of(actor_wg_world_size), all_of(rollout_world_size)

    def init_process_group(self, queue: Queue, receivers: int) -> None:
        """Take what `build_topology` made."""
        self._queue, self._receivers = queue, receivers

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        """All training workers go through the weights, of which each has a part; one of them sends."""
        whole = {}
        for name, tensor in weights:
            if self._sends:
                whole[name] = tensor.detach()
        if self._sends:
            assert self._queue is not None
            self._sent = ray.put(whole)
            for _ in range(self._receivers):
                await self._queue.put_async([self._sent])

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Names and tensors, as they were sent."""
        assert self._queue is not None
        (reference,) = await self._queue.get_async()
        for name, tensor in (await reference).items():
            yield name, tensor

    def finalize(self) -> None:
        """All have got them."""
        self._sent = None
