"""How fast the Lightning Server is.

    python tests/benchmarks/server_speed.py

prints five tables: agents' calls, calls that stream, calls of unmodified agents, calls with ever more in the store,
and rollouts. The server has one core, the client and a scripted upstream share another one; everything is written to a
store on disk as in training. Needs a quiet machine; takes about six minutes. `--only calls` makes one table, `--quick`
only shows that it works, `--write` puts the tables into docs/performance.md. It fails as soon as a request gets an
error.

    python tests/benchmarks/server_speed.py --against FOLDER

compares with another checkout that has a .venv: both servers run, and short rounds of both alternate, so that a machine
that is faster at some times than at others is so for both. It prints the median of the ratios of these pairs. A ratio
above 1 means that this checkout does more per second, or takes more CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import psutil
from server_load import OTHER_CORE, SERVER_CORE, TURNS, Connection, Load, Worker, at_once, chat, pin, post, requests_of
from server_peers import AGENTS
from tables import machine, table, write

from agl_core.capture.attaching import bootstrap_variables
from agl_core.client.agent import client_variables
from agl_core.types import AttemptKey
from agl_server.http.listening import run

ROOT = Path(__file__).parents[2]
BENCHMARKS = "tests/benchmarks"
CONCURRENCY = (1, 32, 256)
STORED = (1_000, 10_000, 100_000)
SHAPES = ((32, 6, 32), (1000, 3, 1000), (256, 4, 1000))
"""Runners, turns, and how many rollouts wait in the queue beside those that run."""
IN_FLIGHT = 1000
"""Runners of the shape that runs longer, to show the server's memory."""
ATTEMPTS = 400
"""Leased beforehand for each second of calls; should they not suffice, they are used again."""
MEMORY_EVERY = 1000
"""Rollouts between two looks at the server's memory."""
ROUNDS, AGENT_ROUNDS, PAIRS = 5, 40, 20
AGENT_CALLS, WARM_UP = 20, 30
"""Of an agent's process in a round, and before the first."""


@contextlib.contextmanager
def process(
    checkout: Path, script: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A script of this folder, or of the same folder in another checkout; it is ended at the end."""
    python = sys.executable if checkout == ROOT else str(checkout / ".venv/bin/python")
    command = [python, str(checkout / BENCHMARKS / script), *arguments]
    started = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.terminate()
        started.communicate()


def ask(process: subprocess.Popen[str], line: str) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@dataclass
class Server:
    """The server under test, and the upstream that it forwards to."""

    process: subprocess.Popen[str]
    port: int
    key: str
    upstream: int
    folder: Path
    _kept: int = field(default=0, init=False)

    async def do(self, **command: Any) -> dict[str, Any]:
        return dict(await asyncio.to_thread(ask, self.process, json.dumps(command)))

    async def keep(self, n_queued: int) -> None:
        """Have at least so many rollouts in the queue, for as long as it runs."""
        if n_queued > self._kept:
            await self.do(do="keep", queued=n_queued - self._kept)
            self._kept = n_queued

    def cpu(self) -> float:
        """Seconds of CPU time so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def memory(self) -> float:
        """MiB."""
        return float(psutil.Process(self.process.pid).memory_info().rss / 2**20)


@contextlib.asynccontextmanager
async def running(checkout: Path = ROOT) -> AsyncIterator[Server]:
    """A server with a new store, on a core of its own."""
    with tempfile.TemporaryDirectory() as folder, process(ROOT, "server_peers.py", "upstream", *OTHER_CORE) as upstream:
        assert upstream.stdout is not None
        port = int(upstream.stdout.readline())
        arguments = [f"{folder}/store.sqlite", f"http://127.0.0.1:{port}/v1", *SERVER_CORE]
        with process(checkout, "server_process.py", *arguments) as server:
            assert server.stdout is not None
            ready = json.loads(server.stdout.readline())
            yield Server(server, ready["port"], ready["key"], port, Path(folder))


@dataclass(frozen=True)
class Calls:
    """Calls of agents at one concurrency, beside the same requests sent to the upstream itself."""

    direct: Load
    through: Load
    cpu: float
    """The server's CPU time per call, in milliseconds."""

    def added(self, quantile: float) -> float:
        """Milliseconds."""
        through, direct = (np.quantile(load.latencies, quantile) for load in (self.through, self.direct))
        return float(1000 * (through - direct))


async def calls(server: Server, concurrency: int, seconds: float, **more: Any) -> Calls:
    """Agents' calls alone, with `more` fields: their attempts are leased before and closed after."""
    request = post("/v1/chat/completions", "upstream-key", {**chat(TURNS - 1, "0"), **more})
    direct = await at_once(server.upstream, "", concurrency, seconds / 3, lambda worker: worker.call(request))
    leases = await leased(server, concurrency + int(seconds * ATTEMPTS))
    conversations = itertools.cycle([requests_of(lease, TURNS, **more) for lease in leases])
    requests: dict[str, Iterator[bytes]] = {}

    async def call(worker: Worker) -> None:
        following = next(requests.get(worker.name, iter(())), None)
        if following is None:
            requests[worker.name] = iter(next(conversations))
            following = next(requests[worker.name])
        await worker.call(following)

    before = server.cpu()
    through = await at_once(server.port, server.key, concurrency, seconds, call)
    cpu = server.cpu() - before
    await close(server, leases)
    return Calls(direct, through, 1000 * cpu / len(through.latencies))


async def leased(server: Server, n_attempts: int) -> list[dict[str, Any]]:
    await server.keep(n_attempts)
    worker = Worker("calls", server.key, await Connection.to(server.port), Load())
    leases: list[dict[str, Any]] = []
    while len(leases) < n_attempts:
        leases += await worker.lease(min(4096, n_attempts - len(leases)))
    worker.connection.close()
    return leases


async def close(server: Server, leases: Sequence[dict[str, Any]]) -> None:
    remaining = list(leases)

    async def close_some(worker: Worker) -> None:
        while remaining:
            await worker.close(remaining.pop())

    await at_once(server.port, server.key, 32, 0, close_some)


@dataclass(frozen=True)
class Rollouts:
    """Rollouts of one shape over HTTP: lease, calls through the gateway, report."""

    load: Load
    cpu: float
    """The server's CPU time per rollout, in milliseconds."""
    memory: list[tuple[int, float]]
    """How many rollouts were done, and the server's memory then, in MiB."""

    @property
    def per_second(self) -> float:
        return self.load.rollouts / self.load.seconds


async def rollouts(server: Server, runners: int, turns: int, queued: int, seconds: float) -> Rollouts:
    await server.keep(runners + queued)
    memory: list[tuple[int, float]] = []

    async def run_one(worker: Worker) -> None:
        for lease in await worker.lease():
            for request in requests_of(lease, turns):
                await worker.call(request)
            await worker.close(lease)
            if worker.load.rollouts % MEMORY_EVERY == 0:
                memory.append((worker.load.rollouts, server.memory()))

    before = server.cpu()
    load = await at_once(server.port, server.key, runners, seconds, run_one)
    return Rollouts(load, 1000 * (server.cpu() - before) / load.rollouts, memory)


async def in_turn(server: Server, concurrency: Sequence[int], scale: float) -> list[list[Calls]]:
    """The rounds with each concurrency, from the slowest to the fastest: one of each, and so on again."""
    rounds = [[await calls(server, n, 2 * scale) for n in concurrency] for _ in range(ROUNDS)]
    return [sorted(row, key=lambda result: result.through.calls_per_second) for row in zip(*rounds, strict=True)]


async def calls_table(scale: float) -> str:
    async with running() as server:
        measured = await in_turn(server, CONCURRENCY, scale)
    rows = []
    for concurrency, rounds in zip(CONCURRENCY, measured, strict=True):
        slowest, middle, fastest = (rounds[number] for number in (0, len(rounds) // 2, -1))
        rows.append(
            f"{concurrency} | {middle.added(0.5):.2f} ms | {middle.added(0.99):.2f} ms "
            f"| {middle.through.calls_per_second:,.0f} "
            f"| {slowest.through.calls_per_second:,.0f} and {fastest.through.calls_per_second:,.0f} "
            f"| {middle.cpu:.2f} ms | {middle.direct.calls_per_second:,.0f} calls/s"
        )
    return table(
        "Calls of agents at once | added, median | added, p99 | calls/s | slowest and fastest round "
        "| server's CPU per call | upstream alone",
        rows,
    )


async def streams_table(scale: float) -> str:
    rows = []
    async with running() as server:
        for concurrency in CONCURRENCY:
            result = await calls(server, concurrency, 4 * scale, stream=True)
            rows.append(
                f"{concurrency} | {result.added(0.5):.2f} ms | {result.added(0.99):.2f} ms "
                f"| {result.through.calls_per_second:,.0f} | {result.cpu:.2f} ms"
            )
    return table(
        "Streams of a second at once | first token: added, median | p99 | calls/s | server's CPU per call",
        rows,
    )


async def agents_table(scale: float) -> str:
    """Three processes of one agent take turns: without agl, with agl attached and no server, and with both."""
    rows = []
    for kind in AGENTS:
        async with running() as server:
            (lease,) = await leased(server, 1)
            attempt = AttemptKey(lease["rollout"], lease["attempt"])
            upstream, gateway = f"http://127.0.0.1:{server.upstream}", f"http://127.0.0.1:{server.port}"
            plain = {**os.environ, **client_variables(upstream)}
            environments = [plain]
            for root, path in ((upstream, ""), (gateway, lease["path"])):
                variables = bootstrap_variables(attempt, root, lease["key"], server.folder, plain)
                environments.append({**plain, **client_variables(f"{root}{path}", lease["key"]), **variables})
            with contextlib.ExitStack() as stack:
                agents = [
                    stack.enter_context(
                        process(ROOT, "server_peers.py", "agent", kind, *OTHER_CORE, environment=environment)
                    )
                    for environment in environments
                ]
                for agent in agents:
                    ask(agent, str(WARM_UP))
                rounds = [
                    [1000 * statistics.median(ask(agent, str(AGENT_CALLS))) for agent in agents]
                    for _ in range(max(2, round(AGENT_ROUNDS * scale)))
                ]
        added = [
            [attached - alone for alone, attached, _ in rounds],
            [whole - attached for _, attached, whole in rounds],
            [whole - alone for alone, _, whole in rounds],
        ]
        without = statistics.median(alone for alone, _, _ in rounds)
        quartiles = [np.quantile(values, (0.25, 0.5, 0.75)) for values in added]
        cells = [f"{middle:.2f} ms ({low:.2f} to {high:.2f})" for low, middle, high in quartiles]
        rows.append(f"{kind} | {without:.2f} ms | {' | '.join(cells)}")
    return table("A call of | without agl | added in the agent's process | by the server | in all", rows)


async def stored_table(scale: float) -> str:
    rows = []
    filled = 0
    async with running() as server:
        for number in STORED:
            wanted = int(number * scale)
            await server.do(do="fill", rollouts=wanted - filled, turns=2)
            filled = wanted
            one, many = (rounds[len(rounds) // 2] for rounds in await in_turn(server, (1, 32), scale))
            rows.append(
                f"{wanted:,} | {one.added(0.5):.2f} ms | {one.cpu:.2f} ms "
                f"| {many.through.calls_per_second:,.0f} | {many.cpu:.2f} ms"
            )
    return table(
        "Rollouts in the store | 1 at once: added, median | CPU per call | 32 at once: calls/s | CPU per call", rows
    )


async def rollouts_table(scale: float) -> str:
    rows = []
    for runners, turns, queued in SHAPES:
        async with running() as server:
            served = await rollouts(server, runners, turns, queued, (60 if runners == IN_FLIGHT else 6) * scale)
        marks = served.memory[:: max(1, len(served.memory) // 3)][:3] + served.memory[-1:]
        memory = ", ".join(f"{memory:.0f} MiB after {done:,}" for done, memory in dict(marks).items())
        rows.append(
            f"{runners:,} runners, {turns} turns, {queued:,} queued | {served.per_second:,.0f} "
            f"| {served.load.calls_per_second:,.0f} | {memory}"
        )
    return table("Shape | rollouts/s | calls/s | server's memory", rows)


TABLES: Mapping[str, Callable[[float], Awaitable[str]]] = {
    "calls": calls_table,
    "streams": streams_table,
    "agents": agents_table,
    "stored": stored_table,
    "rollouts": rollouts_table,
}

Figures: TypeAlias = tuple[float, float]
"""Per second, and milliseconds of CPU time for each."""


async def call_figures(server: Server, scale: float, concurrency: int) -> Figures:
    result = await calls(server, concurrency, 4 * scale)
    return result.through.calls_per_second, result.cpu


async def rollout_figures(server: Server, scale: float) -> Figures:
    result = await rollouts(server, *SHAPES[0], 2 * scale)
    return result.per_second, result.cpu


COMPARED: Mapping[str, Mapping[str, Callable[[Server, float], Awaitable[Figures]]]] = {
    "calls": {f"calls, {n} at once": partial(call_figures, concurrency=n) for n in CONCURRENCY},
    "stored": {
        f"calls, {n} at once, {STORED[-1]:,} rollouts stored": partial(call_figures, concurrency=n) for n in (1, 32)
    },
    "rollouts": {"rollouts, 32 runners of 6 turns": rollout_figures},
}


async def comparison(part: str, other: Path, scale: float) -> str:
    """One row for each measurement of a part, over pairs of rounds."""
    rows = []
    async with running() as here, running(other) as there:
        if part == "stored":
            for server in (here, there):
                await server.do(do="fill", rollouts=int(STORED[-1] * scale), turns=2)
        for name, measure in COMPARED[part].items():
            pairs = []
            for number in range(max(2, round(PAIRS * scale))):
                order = (here, there) if number % 2 else (there, here)
                figures = {server.port: await measure(server, scale) for server in order}
                pairs.append((figures[here.port], figures[there.port]))
            per_second, cpu = ([(ours[i], theirs[i]) for ours, theirs in pairs] for i in range(2))
            rows.append(f"{name} | {_ratio(per_second, ',.0f')} | {_ratio(cpu, '.2f')}")
    return table(
        "Measured | per second, here | there | ratio, median (quartiles) | CPU ms, here | there "
        "| ratio, median (quartiles)",
        rows,
    )


def _ratio(pairs: Sequence[tuple[float, float]], form: str) -> str:
    """Both medians, and the median and the quartiles of the ratios."""
    here, there = (statistics.median(values) for values in zip(*pairs, strict=True))
    low, middle, high = np.quantile([ours / theirs for ours, theirs in pairs], (0.25, 0.5, 0.75))
    return f"{here:{form}} | {there:{form}} | {middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(TABLES), help="repeatable")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout, with a .venv")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.write and (options.only or options.quick or options.against):
        parser.error("--write is for all tables of this checkout, measured in full")
    scale = 0.1 if options.quick else 1.0
    pin(OTHER_CORE)
    tables = []
    for name in TABLES:
        if options.only and name not in options.only:
            continue
        if options.against is None:
            tables.append(run(TABLES[name](scale)))
        elif name in COMPARED:
            tables.append(run(comparison(name, options.against.absolute(), scale)))
        else:
            continue
        print(f"{tables[-1]}\n", flush=True)
    if options.write:
        heading = f"Measured {datetime.date.today():%B %Y} on: {machine()}"
        write("performance.md", Path(__file__).name, "\n\n".join([heading, *tables]))


if __name__ == "__main__":
    main()
