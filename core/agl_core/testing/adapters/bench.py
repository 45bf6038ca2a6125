"""Plays one cell of the matrix on a real Lightning Server with a real store."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from agl_core.config.models import SamplingSection
from agl_core.store.sqlite import SqliteStore
from agl_core.testing.adapters.driver import API_NAMES, Program, Question, Setting
from agl_core.testing.adapters.judge import differences
from agl_core.testing.adapters.matrix import Cell
from agl_core.testing.adapters.upstream import LossyRelay, Play
from agl_core.testing.server import RunningAttempt, Stack, running_stack
from agl_core.types import Call, Episode
from agl_core.wire.headers import rollout_path
from agl_core.worker.environment import PLACEHOLDER_KEY

_PATIENCE = 90.0
"""Seconds that a cell may take."""


Running: TypeAlias = Callable[[Program, Question], Awaitable[None]]
"""How a program is run for a question."""


async def simply(program: Program, question: Question) -> None:
    """Run it, and wait for it."""
    await program(question)


@dataclass(frozen=True)
class Performed:
    """One rollout that was played, and what agl recorded of it."""

    attempt: RunningAttempt
    episode: Episode
    calls: Sequence[Call]


@dataclass
class Bench:
    """A server with its store and a scripted model, and the relay that loses replies."""

    stack: Stack
    relay: LossyRelay

    async def check(self, cell: Cell) -> None:
        """AssertionError if the cell does not pass; or if it does, and is declared a gap."""
        if cell.gap is None:
            wrong = await self.play(cell)
            assert wrong == [], "\n".join(wrong)
            return
        try:
            wrong = await self.play(cell)
        except Exception:
            return
        assert wrong, f"The cell passes although it is declared a gap ({cell.gap}). Take the gap out of the driver."

    async def play(self, cell: Cell) -> list[str]:
        """What differs from the expected episode, in each of the scenario's rollouts."""
        play = Play(cell.scenario)
        performed = await self.perform(cell, play)
        return [*play.faults, *itertools.chain(*(_wrong(cell, each) for each in performed))]

    async def perform(self, cell: Cell, play: Play, run: Running = simply) -> list[Performed]:
        """Play the cell's rollouts, with the model that `play` is."""
        scenario = cell.scenario
        self.stack.upstream.answer = play
        self.relay.lose(scenario.lost)
        root = self.relay.url if scenario.lost else self.stack.server.base_url
        setting = Setting(cell.api, cell.streaming, cell.form, root, PLACEHOLDER_KEY)
        with cell.driver.attached(cell.form):
            program = cell.driver.build(scenario, setting)
            attempts = [await self.stack.attempt(base_url=root) for _ in range(scenario.rollouts)]
            asked = zip(attempts, scenario.questions(), strict=True)
            async with asyncio.timeout(_PATIENCE):
                return await asyncio.gather(*(_roll_out(program, run, *each) for each in asked))


async def _roll_out(program: Program, run: Running, attempt: RunningAttempt, text: str) -> Performed:
    """Run the agent as a worker does."""
    active = attempt.active
    question = Question(text, f"{active.base_url}{rollout_path(*attempt.key)}", active.api_key)

    async def inside() -> None:
        with attempt.running():
            await run(program, question)

    try:
        await asyncio.create_task(inside())
    finally:
        episode = await attempt.close()
    return Performed(attempt, episode, await attempt.calls())


def _wrong(cell: Cell, performed: Performed) -> list[str]:
    """What adapters could not do, and what differs from what is expected."""
    found = [f"an adapter's problem: {text}" for text in performed.attempt.active.recording.problems]
    found += [f"a call by {call.api}" for call in performed.calls if call.api != API_NAMES[cell.api]]
    found += [
        f"call {call.sequence}: streaming is {not cell.streaming}"
        for call in performed.calls
        if bool(call.request.get("stream")) is not cell.streaming
    ]
    return found + differences(cell.scenario.expected, performed.episode)


@contextlib.asynccontextmanager
async def running_bench(folder: Path, **options: Any) -> AsyncIterator[Bench]:
    """The store is below `folder`; `options` are further ones of the server."""
    sampling = SamplingSection(temperature=0.7, max_tokens=4096)
    async with (
        SqliteStore(folder / "store.sqlite") as store,
        running_stack(store=store, sampling=sampling, timeout=60, attempts=1, **options) as stack,
        LossyRelay(stack.server.base_url) as relay,
    ):
        yield Bench(stack, relay)
