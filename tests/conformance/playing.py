"""Plays cells of the matrix on a real Lightning Server with a real store, and compares what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import itertools
import json
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from agl_core.apis.alone import LocalRollouts
from agl_core.capture import running
from agl_core.capture.requests import HEADER_RETRIES, rollout_path
from agl_core.client.agent import PLACEHOLDER_KEY
from agl_core.config.models import SamplingSection
from agl_core.plugins import Plugins
from agl_core.testing.scripts import CallTools, Fail, Hold, Received, Say, Step
from agl_core.testing.upstream import END_TOKEN, logprob, served
from agl_core.types import Call, Episode, Transition
from agl_server.store.sqlite import SqliteStore
from agl_server.testing import LeasedAttempt, Stack, running_stack

from .driver import API_NAMES, Cell, Program, Question, Reply, Scenario, Setting, Turn
from .scenarios import expected

_MEET = 20.0
"""Seconds that requests which are to be there together wait for each other."""
_PATIENCE = 90.0
"""Seconds that a cell may take."""


class Play:
    """The answers of a scripted model server while a scenario is played.

    An agent is known by its system prompt; each of its requests gets the next reply of its script.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.faults: list[str] = []
        """The deviations from the script."""
        self.held = Hold(Say("This comes too late.")) if scenario.given_up else None
        """Answers the first request."""
        self.in_thread = scenario.in_thread
        self._agents = {agent.name: agent for agent in scenario.everyone()}
        self._together = scenario.together
        self._arrived: Counter[str] = Counter()
        self._replies: Counter[tuple[str, int]] = Counter()
        self._schemas: set[str] = set()
        """The agents whose requests have the fields of their schema."""
        self._met = asyncio.Event()

    async def __call__(self, received: Received) -> Step:
        if self.held and not self.held.arrived.is_set():
            return self.held
        text = json.dumps(received.body["messages"])
        name = next((agent for agent in self._agents if f"You are {agent}." in text), None)
        if name is None:
            return self._fault("A request has the system prompt of no agent of the scenario", text)
        await self._meet(name)
        numbered = re.search(r"#(\d+)", text)
        rollout = int(numbered[1]) if numbered else 0
        key = (name, rollout)
        self._replies[key] += 1
        agent, says = self._agents[name], self._agents[name].says
        if self._replies[key] > len(says):
            return self._fault(f"{name} calls more often than its script has replies", text)
        if agent.answers and all(field in json.dumps(received.body) for field in agent.answers.model_fields):
            self._schemas.add(name)
        if agent.answers and self._replies[key] == len(says) and name not in self._schemas:
            self.faults.append(f"{name} is to answer by a schema, and no request had it")
        return says[self._replies[key] - 1]

    async def _meet(self, name: str) -> None:
        self._arrived[name] += 1
        if self._arrived[name] > self._together.get(name, 0):
            return
        if all(self._arrived[agent] >= count for agent, count in self._together.items()):
            self._met.set()
        try:
            await asyncio.wait_for(self._met.wait(), _MEET)
        except TimeoutError:
            self.faults.append(f"{name}'s request waited {_MEET:g} s for those that were to run beside it")

    def _fault(self, text: str, messages: str) -> Fail:
        self.faults.append(f"{text}: {messages[:2000]}")
        return Fail(400)


@contextlib.asynccontextmanager
async def losing(target: str, lost: frozenset[int]) -> AsyncIterator[str]:
    """The address of a relay to `target`: of these requests, counted without retries, it hears the reply and hangs up.

    Without any it is the target itself.
    """
    if not lost:
        yield target
        return
    numbers = itertools.count()

    async def relay(request: web.Request) -> web.StreamResponse:
        is_lost = request.headers.get(HEADER_RETRIES, "0") == "0" and next(numbers) in lost
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        body = await request.read()
        async with client.post(f"{target}{request.path}", data=body, headers=headers) as reply:
            kind = {"Content-Type": reply.headers.get("Content-Type", "")}
            response = web.Response(body=await reply.read(), status=reply.status, headers=kind)
        if is_lost and request.transport:
            request.transport.close()
        return response

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/{path:.*}", relay)
    async with aiohttp.ClientSession(auto_decompress=False) as client, served(app) as url:
        yield url


def tokens(reply: Reply, choice: int = 0) -> list[int]:
    """The ids that the upstream samples for a reply: its bytes, and the end."""
    if isinstance(reply, CallTools):
        calls = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments, *_ in reply.calls]
        text = reply.text or json.dumps(calls)
    else:
        text = f"{reply.text} ({choice})" if choice else reply.text
    return [*text.encode(), END_TOKEN]


def differences(scenario: Scenario, episode: Episode) -> list[str]:
    """The faults of the episode; none, if it is exactly as expected."""
    calls = [list(call) for _, call in groupby(episode.transitions, key=lambda t: t.key.call)]
    turns = [call[0].turn for call in calls]
    wrong = [] if turns == list(range(len(calls))) else [f"the turns are numbered {turns}"]
    if episode.unjoined:
        wrong.append(f"tool results joined with no call: {[(o.tool, str(o.status)) for o in episode.unjoined]}")
    if len({call[0].key.call for call in calls}) != len(calls):
        wrong.append("a call's transitions are apart, or two calls have one id")
    for block in expected(scenario):
        turns_of_block = [turn for branch in block for turn in branch]
        taken, calls = calls[: len(turns_of_block)], calls[len(turns_of_block) :]
        wrong += _of_branches(block, taken)
        # Which of several branches of one agent came first is open, and so is who has which number.
        numbers = sorted((turn.agent, turn.number) for turn in turns_of_block)
        given = sorted((str(call[0].agent), call[0].agent_turn) for call in taken)
        wrong += [] if numbers == given else [f"agents and turns are {given}, not {numbers}"]
    return wrong + [f"one call too many: {_shown(call)}" for call in calls]


def _of_branches(branches: Sequence[list[Turn]], calls: Sequence[Sequence[Transition]]) -> list[str]:
    """Calls may come in any order that keeps the order of each branch."""
    wrong = []
    for call in calls:
        tried = [(_of_call(branch[0], call), branch) for branch in branches if branch]
        differs, nearest = min(tried, key=lambda pair: len(pair[0]), default=(["one call too many"], [None]))
        wrong += differs
        nearest.pop(0)
    return wrong + [f"no call for {turn}" for branch in branches for turn in branch]


def _of_call(turn: Turn, call: Sequence[Transition]) -> list[str]:
    wrong = []

    def expect(what: str, given: Any, wanted: Any) -> None:
        if given != wanted:
            wrong.append(f"{what} of {_shown(call)} is {given!r}, not {wanted!r}")

    expect("the agent", [t.agent for t in call], [turn.agent] * turn.choices)
    expect("choices", [t.key.choice for t in call], list(range(turn.choices)))
    for choice, t in enumerate(call):
        ids, results = tokens(turn.reply, choice), t.tool_results
        prompt = "" if t.prompt_ids is None else bytes(t.prompt_ids.tolist()).decode()
        expect("the response's ids", _plain(t.response_ids), ids)
        expect("the log-probabilities", _plain(t.logprobs), _plain(np.array([logprob(i) for i in ids], np.float32)))
        expect("whose system prompt it is", f"You are {turn.agent}." in prompt, True)
        expect(f"{turn.forgot!r} in the prompt", bool(turn.forgot) and turn.forgot in prompt, False)
        told = [(tool, status, turn.agent) for tool, status in turn.tool_results]
        expect("the tool results", [(o.tool, str(o.status), o.agent) for o in results], told)
        if isinstance(turn.reply, CallTools):
            ids_asked = [tool_call["id"] for tool_call in t.response.get("tool_calls") or ()]
            expect("the tool calls of the tool results", [o.tool_call_id for o in results], ids_asked)
            arguments = [dict(given) for _, given, *_ in turn.reply.calls]
            expect("the arguments", [o.arguments for o in results], arguments)
    return wrong


def _plain(values: Any) -> list[Any] | None:
    return None if values is None else values.tolist()


def _shown(call: Iterable[Transition]) -> str:
    first = next(iter(call))
    reply = first.response.get("content") or first.response.get("tool_calls")
    return f"call {first.turn} ({first.agent}: {reply!r})"


@dataclass(frozen=True)
class Performed:
    """One rollout that was played, and what agl recorded of it."""

    attempt: LeasedAttempt
    episode: Episode
    calls: Sequence[Call]


@dataclass
class Bench:
    """A server with its store and a scripted model."""

    stack: Stack

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
        """The differences from the expected episode, in each of the scenario's rollouts."""
        faults, performed = await self.perform(cell)
        return [*faults, *itertools.chain(*(_wrong(cell, part) for part in performed))]

    async def perform(self, cell: Cell) -> tuple[list[str], list[Performed]]:
        """The deviations from the script, and agl's records of each rollout."""
        scenario, play = cell.scenario, Play(cell.scenario)
        self.stack.upstream.answer = play
        async with losing(self.stack.server.base_url, scenario.lost) as root:
            setting = Setting(cell.api, cell.streaming, cell.form, root, PLACEHOLDER_KEY)
            with _process_as_it_was(), cell.driver.attached(cell.form):
                program = cell.driver.build(scenario, setting)
                attempts = [await self.stack.attempt(base_url=root) for _ in range(scenario.rollouts)]
                questions = zip(attempts, scenario.questions(), strict=True)
                async with asyncio.timeout(_PATIENCE):
                    performed = await asyncio.gather(*(_roll_out(program, play, *question) for question in questions))
        return play.faults, performed

    async def play_alone(self, cell: Cell) -> list[str]:
        """The differences from the expected episodes where the agent calls the model's server itself."""
        scenario, play, alone = cell.scenario, Play(cell.scenario), LocalRollouts()
        self.stack.upstream.answer = play
        setting = Setting(cell.api, cell.streaming, cell.form, self.stack.upstream.root, PLACEHOLDER_KEY)

        async def run(number: int, text: str) -> None:
            rollout = alone.begin(f"r{number}", text)
            with running(rollout.attempt):
                await _run(program, play, Question(text, setting.root, setting.api_key))
            rollout.finish()

        with _process_as_it_was(), cell.driver.attached(cell.form):
            program = cell.driver.build(scenario, setting)
            async with asyncio.timeout(_PATIENCE), asyncio.TaskGroup() as tasks:
                for number, text in enumerate(scenario.questions()):
                    tasks.create_task(run(number, text))
        return [*play.faults, *(wrong for e in alone.episodes() for wrong in differences(scenario, e))]


async def _roll_out(program: Program, play: Play, attempt: LeasedAttempt, text: str) -> Performed:
    """Run the agent as a worker does."""
    active = attempt.active
    question = Question(text, f"{active.base_url}{rollout_path(*attempt.key)}", active.api_key)

    async def inside() -> None:
        with attempt.running():
            await _run(program, play, question)

    try:
        await asyncio.create_task(inside())
    finally:
        episode = await attempt.close()
    return Performed(attempt, episode, await attempt.calls())


async def _run(program: Program, play: Play, question: Question) -> None:
    """Run the agent; one that is given up is cancelled first, and one of a thread runs in a thread."""

    async def run() -> None:
        await program(question)

    if play.held:
        first = asyncio.create_task(run())
        await play.held.arrived.wait()
        first.cancel()
        await asyncio.wait([first])
        play.held.release.set()
    await (_in_thread(run) if play.in_thread else run())


async def _in_thread(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    done = Future[None]()

    def work() -> None:
        try:
            done.set_result(asyncio.run(run()))
        except Exception as error:
            done.set_exception(error)

    # A client of an earlier cell closes its connections where it is collected. In that thread, it would take this
    # loop's sockets out of its selector, and a request might never be seen.
    gc.collect()
    threading.Thread(target=work).start()
    await asyncio.wrap_future(done)


def _wrong(cell: Cell, performed: Performed) -> list[str]:
    """The adapters' problems, and the differences from what is expected."""
    faults = [f"an adapter's problem: {text}" for text in performed.attempt.active.recording.problems]
    faults += [f"a call by {call.api}" for call in performed.calls if call.api != API_NAMES[cell.api]]
    faults += [
        f"call {call.sequence}: streaming is {not cell.streaming}"
        for call in performed.calls
        if bool(call.request.get("stream")) is not cell.streaming
    ]
    return faults + differences(cell.scenario, performed.episode)


@contextlib.asynccontextmanager
async def running_bench(folder: Path) -> AsyncIterator[Bench]:
    """The store is below `folder`."""
    sampling = SamplingSection(temperature=0.7, max_tokens=4096)
    async with (
        SqliteStore(folder / "store.sqlite") as store,
        running_stack(store=store, sampling=sampling, timeout=60, attempts=1, hook=Plugins.load().hook) as stack,
    ):
        yield Bench(stack)


@contextlib.contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Take out what LangChain's and OpenTelemetry's adapters hooked in: each cell finds the process as a user's
    program would. The others report to an attempt that runs, and to nobody else."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            if context := _installed("langchain_core.tracers.context"):
                patch.setattr(context, "_configure_hooks", list(context._configure_hooks))
            if sdk := _installed("opentelemetry.sdk.trace"):
                patch.setattr(sdk.TracerProvider, "__init__", sdk.TracerProvider.__init__)
            yield
    finally:
        for module, name in _CACHES:
            if cached := _installed(module):
                getattr(cached, name).cache_clear()


_CACHES = (
    ("agl_langchain.callback", "attach"),
    ("agl_otel.watching", "watch"),
    # LangChain shares async connections, which belong to one event loop.
    ("langchain_openai.chat_models._client_utils", "_cached_async_httpx_client"),
)


def _installed(module: str) -> Any:
    """None if it is not: a driver that was named needs its own framework alone."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        return None
