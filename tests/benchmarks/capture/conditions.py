"""Under which conditions agents run: what users do with them, and what may be missing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import openai
from aiohttp import web

from agl_core.config.models import GatewaySection, PassthroughSection
from agl_core.testing.adapters.catalogue import HANDOFF, PARALLEL_TOOLS, SUB_AGENTS, TWO_AGENTS
from agl_core.testing.adapters.driver import Program, Question, Scenario
from agl_core.testing.adapters.playing import Bench, Play, running_bench
from agl_core.testing.scripts import Hold, Received, Say, Step
from agl_core.testing.upstream import served

NOTHING = "no adapter attached"
"""The form in which requests are stamped, as they are in every worker, and no adapter says anything."""
BEGUN_BY_ONE = (PARALLEL_TOOLS, HANDOFF, SUB_AGENTS)
"""Scenarios whose first call is the only one at its time: with it, the whole run is held back."""


class Condition:
    """As the agent is: it is awaited."""

    name = "as it is"
    blind = False
    """Whether evidence is withheld, so that the recorder can only say that it is missing."""
    scenarios: Sequence[Scenario] = (PARALLEL_TOOLS, HANDOFF, SUB_AGENTS, TWO_AGENTS)
    """What is played under it."""
    form: str | None = None
    """The form that the condition is played in; None: the driver's first."""

    def play(self, scenario: Scenario) -> Play:
        """The model."""
        return Play(scenario)

    async def run(self, program: Program, question: Question, play: Play) -> None:
        """Run the agent."""
        await program(question)

    @contextlib.asynccontextmanager
    async def bench(self, folder: Path) -> AsyncIterator[Bench]:
        """Where it is played."""
        async with running_bench(folder) as bench:
            yield bench


class InThread(Condition):
    """A thread of the user's own, which inherits no context."""

    name = "in a thread"

    async def run(self, program: Program, question: Question, play: Play) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        thread = threading.Thread(target=_run_and_tell, args=(program, question, done))
        thread.start()
        await done
        thread.join()


def _run_and_tell(program: Program, question: Question, done: asyncio.Future[None]) -> None:
    loop = done.get_loop()
    try:
        asyncio.run(_awaited(program, question))
    except Exception as error:
        loop.call_soon_threadsafe(done.set_exception, error)
    else:
        loop.call_soon_threadsafe(done.set_result, None)


async def _awaited(program: Program, question: Question) -> None:
    await program(question)


class _FirstHeld(Play):
    """Holds the first request back; the script answers all others."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.hold = Hold(Say("This comes too late."))
        self._is_first = True

    async def __call__(self, received: Received) -> Step:
        if self._is_first:
            self._is_first = False
            return self.hold
        return await super().__call__(received)


class GivenUp(Condition):
    """What `asyncio.wait_for` does when the time is over."""

    name = "given up"
    scenarios = BEGUN_BY_ONE
    runs_beside = False
    """Whether the second run takes place before the first is cancelled."""

    def play(self, scenario: Scenario) -> Play:
        return _FirstHeld(scenario)

    async def run(self, program: Program, question: Question, play: Play) -> None:
        assert isinstance(play, _FirstHeld)
        first = asyncio.create_task(_awaited(program, question))
        await play.hold.arrived.wait()
        if self.runs_beside:
            await asyncio.create_task(_awaited(program, question))
        await _cancelled(first)
        play.hold.release.set()
        if not self.runs_beside:
            await program(question)


class Hedged(GivenUp):
    """The first answer counts, and the slower agent is cancelled."""

    name = "hedged"
    runs_beside = True


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


class BesideEmbeddings(Condition):
    """Retrieval beside the model."""

    name = "beside embeddings"

    @contextlib.asynccontextmanager
    async def bench(self, folder: Path) -> AsyncIterator[Bench]:
        async def embed(request: web.Request) -> web.Response:
            vector = {"object": "embedding", "index": 0, "embedding": [0.5, 0.5]}
            usage = {"prompt_tokens": 1, "total_tokens": 1}
            return web.json_response({"object": "list", "data": [vector], "model": "embedder", "usage": usage})

        app = web.Application()
        app.router.add_post("/v1/embeddings", embed)
        async with (
            served(app) as url,
            running_bench(folder, gateway=GatewaySection(passthrough=PassthroughSection(url=f"{url}/v1"))) as bench,
        ):
            yield bench

    async def run(self, program: Program, question: Question, play: Play) -> None:
        async with openai.AsyncOpenAI(base_url=f"{question.root}/v1", api_key=question.api_key) as client:

            async def embed() -> None:
                await client.embeddings.create(model="embedder", input="hello", encoding_format="float")

            await embed()
            await asyncio.gather(program(question), embed())


class NothingAttached(Condition):
    """Nothing names the caller: agl has to say so."""

    name = NOTHING
    blind = True
    scenarios = (HANDOFF, SUB_AGENTS, TWO_AGENTS)  # one unnamed agent alone cannot be taken for another
    form = NOTHING


class WithoutTokenIds(Condition):
    """A model server that does not return what it sampled."""

    name = "no token ids"
    blind = True

    @contextlib.asynccontextmanager
    async def bench(self, folder: Path) -> AsyncIterator[Bench]:
        async with running_bench(folder) as bench:
            bench.stack.upstream.returns_ids = False
            yield bench


AS_IT_IS = Condition()
CONDITIONS: tuple[Condition, ...] = (
    AS_IT_IS,
    InThread(),
    GivenUp(),
    Hedged(),
    BesideEmbeddings(),
    NothingAttached(),
    WithoutTokenIds(),
)
