"""Starting a local Ray, or joining a cluster. Imports Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import ray

from agl_core.errors import EngineError
from agl_verl.cluster.watch import queue_is_taken
from agl_verl.config.mapping import Resources
from agl_verl.cpu.mending import threads_each
from agl_verl.options import VerlOptions

LOCAL_CPUS = 32
"""The least that a local Ray has: veRL's many small processes each reserve one, and hardly use it."""
OBJECT_STORE = 2**30
"""Bytes for Ray's object store on a machine without a GPU."""
SECONDS_TO_LET_GO = 15.0
"""How long a run that has just ended may still have the cluster's TransferQueue."""


def connect(options: VerlOptions, *, cpu: bool, variables: Mapping[str, str], verl_environment: Any) -> None:
    """Have a Ray with enough resources; EngineError if there is none.

    `verl_environment` is veRL's own runtime environment, to which `variables` of the environment are added. agl's
    packages have to be installed on every node.
    """
    ours = dict(variables)
    wanted = Resources.of(options, cpu=cpu)
    if cpu:
        ours["OMP_NUM_THREADS"] = threads_each(wanted.total)
    environment = {**verl_environment, "env_vars": {**verl_environment.get("env_vars", {}), **ours}}
    if options.address is not None:
        _join(options.address, environment)
        _wait_for_the_queue(options.address)
    else:
        _start(options, environment, cpu=cpu)
    found = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    lacking = wanted.lacking(found)
    if lacking is not None:
        where = f"The Ray cluster at {options.address!r}" if options.address else "This machine"
        raise EngineError(f"{where} has {lacking}. Lower them, or join a larger cluster with engine.verl.address.")


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
    while queue_is_taken():
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
        settings |= {"num_gpus": Resources.of(options, cpu=cpu).total, "object_store_memory": OBJECT_STORE}
    ray.init(**settings)
