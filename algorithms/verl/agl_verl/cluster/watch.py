"""Whether what the engine stands on is still there: its actors, and the nodes of its Ray cluster. Imports Ray.

veRL learns of a loss by whatever breaks first, a connection between two workers say, or never: TransferQueue waits for
its controller without an end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Any

import ray
from ray.util import list_named_actors

from agl_verl.cluster.faults import lost, remedy_of

QUEUE_NAMESPACE, QUEUE = "transfer_queue", "TransferQueueController"
"""TransferQueue's controller, of which a cluster has one."""
_INTERVAL = 2.0
_SECONDS_TO_SAY_WHY = 10.0

_log = logging.getLogger(__name__)


class Watch:
    """Remembers what is there when it is made."""

    def __init__(self) -> None:
        self._nodes = _nodes()
        self._actors = {name: ray.get_actor(name, namespace=where) for where, name in _ours()}

    @property
    def on_several_nodes(self) -> bool:
        """Ray misses an actor at once, but a node only after a while."""
        return len(self._nodes) > 1

    def wait(self) -> str:
        """What was lost, in words; returns as soon as Ray knows."""
        pause = threading.Event()
        while True:
            pause.wait(_INTERVAL)
            try:
                actors = self._actors.keys() - {name for _, name in _ours()}
                left = _nodes()
            except Exception as error:  # Ray has several for a head that is away, and ends this process after a minute.
                _log.warning("Ray's head does not answer: %s", error)
                continue
            if actors:
                nodes = [address for node, address in self._nodes.items() if node not in left]
                # Those on a lost node end with it.
                why = None if nodes else remedy_of(ends_of(self._actors[name] for name in actors))
                return lost(actors, nodes, why)


def queue_is_taken() -> bool:
    """Whether a run of veRL, this one or another, has the cluster's TransferQueue."""
    return (QUEUE_NAMESPACE, QUEUE) in _named()


def ends_of(actors: Iterable[Any]) -> str:
    """What Ray says of those of the actors that are gone, a line for each."""
    asked = [actor.__ray_ready__.remote() for actor in actors]
    ended, _ = ray.wait(asked, num_returns=len(asked), timeout=_SECONDS_TO_SAY_WHY)
    said = []
    for each in ended:
        try:
            ray.get(each)
        except ray.exceptions.RayError as error:
            said.append(f"{type(error).__module__}.{type(error).__name__}: {error}")
    return "\n".join(said)


def _ours() -> set[tuple[str, str]]:
    """Namespaces and names of all actors of this run (every one that it waits for has a name)."""
    ours = (ray.get_runtime_context().namespace, QUEUE_NAMESPACE)
    return {(namespace, name) for namespace, name in _named() if namespace in ours}


def _named() -> set[tuple[str, str]]:
    return {(each["namespace"], each["name"]) for each in list_named_actors(all_namespaces=True)}


def _nodes() -> dict[str, str]:
    """Addresses of the nodes that are up, by id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
