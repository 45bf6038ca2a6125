"""What the driver notices of a loss, with a Ray of its own; the loss of a node is in `live_cluster.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from agl_verl.cluster.watch import QUEUE, QUEUE_NAMESPACE, Watch, queue_is_taken


@ray.remote(num_cpus=0)
class Process:
    """Stands for one of the engine's."""


@pytest.fixture
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


def test_a_process_of_the_engine_that_is_gone_is_told_by_its_name(local_ray: None) -> None:
    """Also TransferQueue's controller, which has a namespace of its own; another run's processes are not told."""
    assert not queue_is_taken()
    names = [("worker_0", None), (QUEUE, QUEUE_NAMESPACE), ("worker_1", "another run")]
    worker, controller, other = (Process.options(name=name, namespace=where).remote() for name, where in names)
    ray.get([each.__ray_ready__.remote() for each in (worker, controller, other)])
    assert queue_is_taken()
    watch = Watch()
    assert not watch.on_several_nodes
    for each in (other, controller):
        ray.kill(each)
    assert watch.wait().endswith(f"No longer there: {QUEUE}.")
