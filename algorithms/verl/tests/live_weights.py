"""Weights on their way from training workers to serving workers on a CPU: veRL's protocol, with a Ray of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import ray
import torch
from torch import Tensor
from verl.checkpoint_engine import CheckpointEngineRegistry

from agl_verl.cpu_weights import ObjectStoreWeights
from agl_verl.environment import CPU_WEIGHTS


@pytest.fixture
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


def test_every_server_gets_all_weights_of_each_exchange(local_ray: None) -> None:
    """Two training workers, of which one sends, and two servers; two exchanges over the same engines."""
    made = CheckpointEngineRegistry.get(CPU_WEIGHTS)
    training = [made(bucket_size=1, is_master=True), made(bucket_size=1, is_master=False)]
    serving = [made(bucket_size=1), made(bucket_size=1)]
    for version in (1.0, 2.0):
        weights = {"layer": torch.full((2, 3), version), "norm": torch.tensor([0.5, version], dtype=torch.bfloat16)}
        parts = [iter(weights.items()) for _ in training]
        topology = made.build_topology(2, 2, [each.prepare() for each in (*training, *serving)])
        for workers, arguments in zip((training, serving), topology, strict=True):
            for place, worker in enumerate(workers):
                worker.init_process_group(**{name: values[place] for name, values in arguments.items()})
        for received in asyncio.run(exchange(training, parts, serving)):
            assert received.keys() == weights.keys()
            for name, tensor in weights.items():
                torch.testing.assert_close(received[name], tensor, rtol=0, atol=0)
        assert [list(rest) for rest in parts] == [[], []], "each has a part of every tensor: all go through them"
        for each in (*training, *serving):
            each.finalize()


async def exchange(
    training: list[ObjectStoreWeights], parts: list[Iterator[tuple[str, Tensor]]], serving: list[ObjectStoreWeights]
) -> list[dict[str, Tensor]]:
    """All of them at the same time, as veRL calls them; what the servers got."""

    async def everything(server: ObjectStoreWeights) -> dict[str, Tensor]:
        return {name: tensor async for name, tensor in server.receive_weights()}

    sending = [worker.send_weights(part) for worker, part in zip(training, parts, strict=True)]
    done = await asyncio.gather(*sending, *map(everything, serving))
    return list(done[len(sending) :])
