"""The benchmarks of the Lightning Server as tables."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from client_measures import clients
from client_process import KINDS
from server_measures import Calls, Rollouts, Server, calls, rollouts, running, workers

CONCURRENCY = (1, 32, 256)
SHAPES = ((32, 6, 32), (1000, 3, 1000), (256, 4, 1000))
"""Runners, turns, and how many rollouts wait in the queue beside those that run."""
IN_FLIGHT = 1000
STORED = (1_000, 10_000, 100_000)
WORKERS = 300
ROUNDS = 5
"""How often calls are measured."""
CLIENT_ROUNDS = 40
"""How often agents' processes take turns."""


class Tables:
    """Measures in `folder`. `scale` shortens every time and shrinks the stores."""

    def __init__(self, folder: Path, scale: float) -> None:
        self._folder, self._scale = folder, scale

    @property
    def parts(self) -> Mapping[str, Callable[[], Awaitable[str]]]:
        """What makes each table, by its name."""
        return {
            "calls": self._calls,
            "clients": self._clients,
            "stored": self._stored,
            "rollouts": self._rollouts,
            "workers": self._workers,
        }

    async def _calls(self) -> str:
        async with running(self._folder) as server:
            measured = await self._in_turn(server, CONCURRENCY)
        return self._table(
            "Calls of agents at once | added, median | added, p99 | calls/s | slowest and fastest round "
            "| server's CPU per call | upstream alone",
            (
                f"{each.concurrency} | {each.added(0.5):.2f} ms | {each.added(0.99):.2f} ms "
                f"| {each.through.per_second:,.0f} "
                f"| {rounds[0].through.per_second:,.0f} and {rounds[-1].through.per_second:,.0f} "
                f"| {each.cpu_per_call:.2f} ms | {each.direct.per_second:,.0f} calls/s"
                for rounds in measured
                for each in [rounds[len(rounds) // 2]]
            ),
        )

    async def _clients(self) -> str:
        rows: list[str] = []
        for kind in KINDS:
            async with running(self._folder) as server:
                found = await clients(server, kind, round(CLIENT_ROUNDS * self._scale))
            rows.append(f"{kind} | {found.without:.2f} ms | {found.client} | {found.server} | {found.whole}")
        return self._table("A call of | without agl | added in the agent's process | by the server | in all", rows)

    async def _stored(self) -> str:
        rows: list[str] = []
        filled = 0
        async with running(self._folder) as server:
            for number in STORED:
                wanted = int(number * self._scale)
                await server.do(do="fill", rollouts=wanted - filled, turns=2)
                filled = wanted
                one, many = [rounds[len(rounds) // 2] for rounds in await self._in_turn(server, (1, 32))]
                rows.append(
                    f"{wanted:,} | {one.added(0.5):.2f} ms | {one.cpu_per_call:.2f} ms "
                    f"| {many.through.per_second:,.0f} | {many.cpu_per_call:.2f} ms"
                )
        return self._table(
            "Rollouts in the store | 1 at once: added, median | CPU per call | 32 at once: calls/s | CPU per call", rows
        )

    async def _in_turn(self, server: Server, concurrency: Sequence[int]) -> list[list[Calls]]:
        """The rounds with each concurrency, from the slowest to the fastest: one of each, and so on again.

        So a machine that is faster at some times than at others is so for all of them.
        """
        rounds = [[await calls(server, each, 2 * self._scale) for each in concurrency] for _ in range(ROUNDS)]
        return [sorted(each, key=lambda made: made.through.per_second) for each in zip(*rounds, strict=True)]

    async def _rollouts(self) -> str:
        rows: list[str] = []
        for runners, turns, queued in SHAPES:
            seconds = 6 * self._scale
            served = 60 * self._scale if runners == IN_FLIGHT else seconds
            async with running(self._folder) as server:
                measured = await rollouts(server, runners, turns, queued, seconds, served)
            rows.append(
                f"{runners:,} runners, {turns} turns, {queued:,} queued | {measured.stored:,.0f} "
                f"| {measured.served.rollouts / measured.served.seconds:,.0f} | {measured.served.per_second:,.0f} "
                f"| {_memory(measured)}"
            )
        return self._table("Shape | store alone: rollouts/s | over HTTP: rollouts/s | calls/s | server's memory", rows)

    async def _workers(self) -> str:
        async with running(self._folder) as server:
            load = (await workers(server, WORKERS, 8 * self._scale)).load
        latencies = sorted(load.latencies)
        median, late = (1000 * latencies[int(len(latencies) * each)] for each in (0.5, 0.99))
        return self._table(
            "Light workers | leased and reported, rollouts/s | heartbeat, median | heartbeat, p99",
            [f"{WORKERS} | {load.rollouts / load.seconds:,.0f} | {median:.0f} ms | {late:.0f} ms"],
        )

    @staticmethod
    def _table(head: str, rows: Iterable[str]) -> str:
        lines = [f"| {row} |" for row in (head, *rows)]
        lines.insert(1, "|" + "---|" * (head.count("|") + 1))
        return "\n".join(lines)


def _memory(measured: Rollouts) -> str:
    marks = measured.memory[:: max(1, len(measured.memory) // 3)][:3] + measured.memory[-1:]
    return ", ".join(f"{memory:.0f} MiB after {done:,}" for done, memory in dict(marks).items())
