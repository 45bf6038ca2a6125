"""The Ray cluster: starting a local one or joining one, and watching what the engine stands on. Imports Ray.

veRL learns of a loss by whatever breaks first, a connection between two workers say, or never: TransferQueue waits for
its controller without an end.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.util import list_named_actors

from agl_core.errors import EngineError
from agl_verl.config import gpus, lacking
from agl_verl.options import VerlOptions
from agl_verl.plugin import PROCESS_LOST, remedy_of

LOCAL_CPUS = 32
"""The least that a local Ray has: veRL's many small processes each reserve one, and hardly use it."""
OBJECT_STORE = 2**30
"""Bytes for Ray's object store on a machine without a GPU."""
SECONDS_TO_LET_GO = 15.0
"""How long a run that has just ended may still have the cluster's TransferQueue."""


def connect(options: VerlOptions, *, cpu: bool, variables: Mapping[str, str], verl_environment: Any) -> None:
    """Have a Ray with enough resources; EngineError if there is none.

    `variables` are added to `verl_environment`, veRL's own runtime environment.
    """
    added = dict(variables)
    if cpu:
        threads = max(1, (os.cpu_count() or 1) // gpus(options))
        added["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
    environment = {**verl_environment, "env_vars": {**verl_environment.get("env_vars", {}), **added}}
    if options.address is not None:
        _join(options.address, environment)
        _wait_for_the_queue(options.address)
    else:
        _start(options, environment, cpu=cpu)
    missing = lacking(options, [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]])
    if missing is not None:
        where = f"The Ray cluster at {options.address!r}" if options.address else "This machine"
        raise EngineError(f"{where} has {missing}. Lower them, or join a larger cluster with engine.verl.address.")


def _join(address: str, environment: dict[str, Any]) -> None:
    if address.startswith("ray://"):
        raise EngineError(
            "engine.verl.address is a Ray Client address, over which veRL cannot run. Start agl on a node of the "
            "cluster with address = 'auto' (for instance as a Ray job)."
        )
    try:
        ray.init(address=address, runtime_env=environment, log_to_driver=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise EngineError(
            f"There is no Ray cluster at {address!r} ({str(error).strip().splitlines()[0]}). Start one with `ray start "
            f"--head` and join its nodes, or leave engine.verl.address out for a local one. If there is one, it may "
            f"ask for a token, as Ray does where the user has one (~/.ray/auth_token): set RAY_AUTH_MODE=token."
        ) from error


def _wait_for_the_queue(address: str) -> None:
    """EngineError while another run is in the cluster: TransferQueue would hand each the other's transitions."""
    deadline = time.monotonic() + SECONDS_TO_LET_GO
    while (QUEUE_NAMESPACE, QUEUE) in _named():
        if time.monotonic() > deadline:
            raise EngineError(
                f"Another run of veRL is under way in the Ray cluster at {address!r}, and a cluster has one "
                f"TransferQueue: let that run end, or join another cluster with engine.verl.address."
            )
        time.sleep(0.5)


def _start(options: VerlOptions, environment: dict[str, Any], *, cpu: bool) -> None:
    if options.nodes > 1:
        raise EngineError(
            f"engine.verl.nodes is {options.nodes}, but a local Ray has one node: name a cluster in "
            f"engine.verl.address."
        )
    settings: dict[str, Any] = {
        "num_cpus": max(LOCAL_CPUS, os.cpu_count() or 1),
        "include_dashboard": False,
        "runtime_env": environment,
    }
    if cpu:
        settings |= {"num_gpus": gpus(options), "object_store_memory": OBJECT_STORE}
    ray.init(**settings)


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
        """Return as soon as Ray misses a part, with words for the loss."""
        while True:
            time.sleep(_INTERVAL)
            try:
                actors = self._actors.keys() - {name for _, name in _ours()}
                remaining = _nodes()
            except Exception as error:  # Ray has several for a head that is away, and ends this process after a minute.
                _log.warning("Ray's head does not answer: %s", error)
                continue
            if actors:
                names = ", ".join(sorted(actors))
                nodes = sorted(address for node, address in self._nodes.items() if node not in remaining)
                if nodes:  # What was on them ended with them.
                    return (
                        f"A node of the Ray cluster was lost ({', '.join(nodes)}), and what ran on it: {names}. Start "
                        f"Ray there again, or join another."
                    )
                why = remedy_of(_ends_of(self._actors[name] for name in actors)) or PROCESS_LOST
                return f"{why} No longer there: {names}."


def _ends_of(actors: Iterable[Any]) -> str:
    """Ray's words for the ends of those actors that are gone, a line for each."""
    pings = [actor.__ray_ready__.remote() for actor in actors]
    ended, _ = ray.wait(pings, num_returns=len(pings), timeout=_SECONDS_TO_SAY_WHY)
    ends = []
    for ping in ended:
        try:
            ray.get(ping)
        except ray.exceptions.RayError as error:
            ends.append(f"{type(error).__module__}.{type(error).__name__}: {error}")
    return "\n".join(ends)


def _ours() -> set[tuple[str, str]]:
    """Namespaces and names of all actors of this run (every one that it waits for has a name)."""
    namespaces = (ray.get_runtime_context().namespace, QUEUE_NAMESPACE)
    return {(namespace, name) for namespace, name in _named() if namespace in namespaces}


def _named() -> set[tuple[str, str]]:
    """Namespaces and names of the cluster's actors, those of other runs too."""
    return {(actor["namespace"], actor["name"]) for actor in list_named_actors(all_namespaces=True)}


def _nodes() -> dict[str, str]:
    """Addresses of the nodes that are up, by id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
