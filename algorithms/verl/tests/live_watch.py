"""What the driver notices of a loss, with a Ray of its own; the loss of a node is in `live_cluster.py`."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import ray

from agl_verl.cluster import QUEUE, QUEUE_NAMESPACE, Watch, ends_of, queue_is_taken
from agl_verl.engine import PROCESS_LOST, remedy_of


@ray.remote(num_cpus=0)
class Process:
    """Stands for one of the engine's."""


@pytest.fixture
def local_ray(request: pytest.FixtureRequest) -> Iterator[None]:
    """With Ray's own settings as the parameter."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, _system_config=getattr(request, "param", None))
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
    assert watch.wait() == f"{PROCESS_LOST} No longer there: {QUEUE}."


@pytest.mark.parametrize(
    "local_ray", [{"memory_usage_threshold": 0.01, "memory_monitor_refresh_ms": 1000}], indirect=True
)
def test_a_process_that_ray_ended_for_memory_is_known_as_such(local_ray: None) -> None:
    process = Process.options(name="server").remote()
    while not (said := ends_of([process])):
        time.sleep(0.2)
    assert "Ray ended a process of the engine because the memory of its node" in (remedy_of(said) or said)
