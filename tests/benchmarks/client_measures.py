"""What agl adds to a call of an unmodified agent: in the agent's process, and in the Lightning Server."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from server_cores import cores
from server_measures import Server, leased, process

from agl_core.capture.attach.environment import bootstrap_variables
from agl_core.types import AttemptKey
from agl_core.worker.environment import client_variables

CALLS = 20
"""Of each process in a round."""
WARM_UP = 30


@dataclass(frozen=True)
class Added:
    """Milliseconds that were added to a call, from round to round."""

    rounds: Sequence[float]

    def __str__(self) -> str:
        low, middle, high = np.quantile(self.rounds, (0.25, 0.5, 0.75))
        return f"{middle:.2f} ms ({low:.2f} to {high:.2f})"


@dataclass(frozen=True)
class Clients:
    """One kind of agent."""

    without: float
    """Milliseconds of a call without agl, median."""
    whole: Added
    process: Added
    """Of these, CPU time of the agent's process: bootstrap, stamps and adapter. The rest is the Lightning Server's."""


async def clients(server: Server, kind: str, rounds: int) -> Clients:
    """Two processes of one agent take turns: one without agl, one attached, whose calls go through the server."""
    (lease,) = await leased(server, 1)
    attempt = AttemptKey(lease["rollout"], lease["attempt"])
    ours = f"http://127.0.0.1:{server.port}"
    plain = {**os.environ, **client_variables(f"http://127.0.0.1:{server.upstream}")}
    attached = {
        **plain,
        **client_variables(f"{ours}{lease['path']}", lease["key"]),
        **bootstrap_variables(attempt, ours, lease["key"], server.folder, plain),
    }
    with contextlib.ExitStack() as stack:
        without, through = (
            stack.enter_context(process("client_process.py", kind, *cores()[1], environment=environment))
            for environment in (plain, attached)
        )
        for agent in (without, through):
            _calls(agent, WARM_UP)
        found = [(_calls(without, CALLS), _calls(through, CALLS)) for _ in range(rounds)]
    whole, worked = zip(*([b - a for a, b in zip(*each, strict=True)] for each in found), strict=True)
    return Clients(statistics.median(seconds for (seconds, _), _ in found), Added(whole), Added(worked))


def _calls(agent: subprocess.Popen[str], calls: int) -> tuple[float, float]:
    """Milliseconds of a call, and of the CPU of its process: medians."""
    assert agent.stdin is not None
    assert agent.stdout is not None
    agent.stdin.write(f"{calls}\n")
    agent.stdin.flush()
    seconds, worked = json.loads(agent.stdout.readline())
    return 1000 * seconds, 1000 * worked
