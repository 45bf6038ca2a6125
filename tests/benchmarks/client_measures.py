"""What agl adds to a call of an unmodified agent: in the agent's process, and in the Lightning Server."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
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

    rounds: list[float]

    def __str__(self) -> str:
        low, middle, high = np.quantile(self.rounds, (0.25, 0.5, 0.75))
        return f"{middle:.2f} ms ({low:.2f} to {high:.2f})"


@dataclass(frozen=True)
class Clients:
    """One kind of agent."""

    without: float
    """Milliseconds of a call without agl, median."""
    client: Added
    """By bootstrap, stamps and adapter, in the agent's process."""
    server: Added
    """By the Lightning Server."""
    whole: Added


async def clients(server: Server, kind: str, rounds: int) -> Clients:
    """Three processes of one agent take turns: without agl, with agl attached and no server, and with both."""
    (lease,) = await leased(server, 1)
    attempt = AttemptKey(lease["rollout"], lease["attempt"])
    upstream, ours = f"http://127.0.0.1:{server.upstream}", f"http://127.0.0.1:{server.port}"
    plain = {**os.environ, **client_variables(upstream)}

    def attached(root: str, path: str) -> dict[str, str]:
        variables = bootstrap_variables(attempt, root, lease["key"], server.folder, plain)
        return {**plain, **client_variables(f"{root}{path}", lease["key"]), **variables}

    with contextlib.ExitStack() as stack:
        agents = [
            stack.enter_context(process("client_process.py", kind, *cores()[1], environment=environment))
            for environment in (plain, attached(upstream, ""), attached(ours, lease["path"]))
        ]
        for agent in agents:
            _median(agent, WARM_UP)
        medians = [[_median(agent, CALLS) for agent in agents] for _ in range(rounds)]
    return Clients(
        statistics.median(without for without, _, _ in medians),
        Added([client - without for without, client, _ in medians]),
        Added([whole - client for _, client, whole in medians]),
        Added([whole - without for without, _, whole in medians]),
    )


def _median(agent: subprocess.Popen[str], calls: int) -> float:
    """Milliseconds of a call."""
    assert agent.stdin is not None
    assert agent.stdout is not None
    agent.stdin.write(f"{calls}\n")
    agent.stdin.flush()
    return 1000 * statistics.median(json.loads(agent.stdout.readline()))
