"""What is measured of the Lightning Server; `server_tables` shows it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from server_cores import cores
from server_load import Client, Connection, Load, Worker, calls_of, chat, post

HERE = Path(__file__).parent
TURNS = 6
"""Calls of an attempt where only calls are measured."""
ATTEMPTS = 400
"""Leased beforehand for each second in which only calls are measured; should they not suffice, they are used again."""
MEMORY_EVERY = 1000
"""Rollouts between two looks at the server's memory."""


@dataclass(frozen=True)
class Server:
    """The server under test, and the upstream that it forwards to."""

    process: subprocess.Popen[str]
    port: int
    key: str
    upstream: int
    folder: Path

    async def do(self, **command: Any) -> dict[str, Any]:
        """Ask something of its process."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()
        return dict(json.loads(await asyncio.to_thread(stdout.readline)))

    @property
    def client(self) -> Client:
        return Client(self.port, self.key)

    def cpu(self) -> float:
        """Seconds of CPU that it has taken."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def memory(self) -> float:
        """What it takes of the machine's, in MiB."""
        return float(psutil.Process(self.process.pid).memory_info().rss / 2**20)


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Server]:
    """A server with a new store, on a core of its own."""
    core, other = cores()
    run = folder / str(time.monotonic_ns())
    run.mkdir()
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(process("server_upstream.py", *other))
        assert upstream.stdout is not None
        upstream_port = int(upstream.stdout.readline())
        server = stack.enter_context(
            process("server_process.py", str(run / "store.sqlite"), f"http://127.0.0.1:{upstream_port}/v1", *core)
        )
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        yield Server(server, ready["port"], ready["key"], upstream_port, run)


@contextlib.contextmanager
def process(
    name: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A script of this folder, which is spoken to in lines; it is ended at the end."""
    command = [sys.executable, str(HERE / name), *arguments]
    started = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.terminate()
        started.communicate()


@dataclass(frozen=True)
class Calls:
    """Calls of agents at one concurrency, beside the same requests sent to the upstream itself."""

    concurrency: int
    direct: Load
    through: Load
    cpu: float
    """Seconds that the server took of its core meanwhile."""

    def added(self, quantile: float) -> float:
        """Milliseconds."""
        through, direct = (np.quantile(load.latencies, quantile) for load in (self.through, self.direct))
        return float(1000 * (through - direct))

    @property
    def cpu_per_call(self) -> float:
        """Milliseconds."""
        return 1000 * self.cpu / len(self.through.latencies)


async def calls(server: Server, concurrency: int, seconds: float) -> Calls:
    """Agents' calls alone: their attempts are leased before and closed after."""
    request = post("/v1/chat/completions", "upstream-key", chat(TURNS - 1, "0"))

    async def ask_upstream(connection: Connection, worker: Worker) -> None:
        await worker.call(connection, request)

    direct = await Client(server.upstream, "").at_once(concurrency, seconds / 3, ask_upstream)
    n_attempts = concurrency + int(seconds * ATTEMPTS)
    leases = await leased(server, n_attempts)
    waiting = itertools.cycle([calls_of(lease, range(TURNS)) for lease in leases])
    asked: dict[str, deque[bytes]] = {}

    async def call(connection: Connection, worker: Worker) -> None:
        requests = asked.get(worker.name)
        if not requests:
            requests = asked[worker.name] = deque(next(waiting))
        await worker.call(connection, requests.popleft())

    before = server.cpu()
    through = await server.client.at_once(concurrency, seconds, call)
    cpu = server.cpu() - before
    await _close(server, leases)
    return Calls(concurrency, direct, through, cpu)


async def leased(server: Server, n_attempts: int) -> list[dict[str, Any]]:
    """So many attempts."""
    await server.do(do="keep", queued=n_attempts)
    connection = await Connection.to(server.port)
    worker = Worker("calls", server.key, Load())
    leases: list[dict[str, Any]] = []
    while len(leases) < n_attempts:
        leases += await worker.lease(connection, min(4096, n_attempts - len(leases)))
    connection.close()
    return leases


async def _close(server: Server, leases: Sequence[dict[str, Any]]) -> None:
    left = list(leases)
    connections = [await Connection.to(server.port) for _ in range(32)]
    worker = Worker("calls", server.key, Load())

    async def close(connection: Connection) -> None:
        while left:
            await worker.close(connection, left.pop())
        connection.close()

    await asyncio.gather(*(close(each) for each in connections))


@dataclass(frozen=True)
class Rollouts:
    """Rollouts of one shape."""

    runners: int
    turns: int
    queued: int
    stored: float
    """Per second, by queue and store alone."""
    served: Load
    """Over HTTP: lease, calls through the gateway, report."""
    memory: tuple[tuple[int, float], ...]
    """How many rollouts were done, and the server's memory then, in MiB."""


async def rollouts(server: Server, runners: int, turns: int, queued: int, seconds: float, served: float) -> Rollouts:
    """One shape: the store for `seconds`, then the whole server for `served`."""
    stored = await server.do(do="store", runners=runners, turns=turns, queued=queued, seconds=seconds)
    await server.do(do="keep", queued=runners + queued)
    n_done = itertools.count(1)
    memory: list[tuple[int, float]] = []

    async def run_one(connection: Connection, worker: Worker) -> None:
        for lease in await worker.lease(connection):
            for request in calls_of(lease, range(turns)):
                await worker.call(connection, request)
            await worker.close(connection, lease)
            if (done := next(n_done)) % MEMORY_EVERY == 0:
                memory.append((done, server.memory()))

    load = await server.client.at_once(runners, served, run_one)
    return Rollouts(runners, turns, queued, stored["rollouts"] / stored["seconds"], load, tuple(memory))


@dataclass(frozen=True)
class Workers:
    """Workers that do nothing but lease, send heartbeats and report."""

    workers: int
    load: Load
    """Its latencies are those of heartbeats."""


async def workers(server: Server, n_workers: int, seconds: float) -> Workers:
    """Each worker holds two rollouts at a time; their agents finish without a call."""
    await server.do(do="keep", queued=2 * n_workers)

    async def work(connection: Connection, worker: Worker) -> None:
        leases = await worker.lease(connection, 2)
        held = [{name: lease[name] for name in ("rollout", "attempt", "secret")} for lease in leases]
        started = time.perf_counter()
        await worker.ask(connection, "heartbeats", {"worker": worker.name, "attempts": held})
        worker.load.latencies.append(time.perf_counter() - started)
        for lease in leases:
            await worker.close(connection, lease)

    return Workers(n_workers, await server.client.at_once(n_workers, seconds, work))
