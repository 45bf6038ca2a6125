"""What watches an agent: agl, a plain OpenTelemetry exporter, and a logging proxy, behind one interface."""

from __future__ import annotations

import asyncio
import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from agl_core.learning.health import health_of
from agl_core.testing.adapters.driver import Cell, Program, Question, Setting
from agl_core.testing.adapters.playing import Bench, LossyRelay, Performed, Play, Relay
from agl_core.types import Episode, Evidence, Transition
from agl_core.wire.headers import rollout_path

from .conditions import NOTHING, Condition
from .scores import Recorded, Response, Tool, as_json, token_ids
from .span_exporter import exported_spans, responses_of_spans

PATIENCE = 60.0
"""Seconds that a cell may take."""


class Recorder(ABC):
    """Plays a cell, and says what it recorded of it."""

    name: str

    @abstractmethod
    async def record(self, bench: Bench, cell: Cell, condition: Condition, play: Play) -> tuple[Recorded, list[str]]:
        """The record, and what failed while the cell was played."""


class Agl(Recorder):
    """agl with its gateway, and what the driver's form attaches."""

    name = "agl"

    async def record(self, bench: Bench, cell: Cell, condition: Condition, play: Play) -> tuple[Recorded, list[str]]:
        failed: list[str] = []

        async def run(program: Program, question: Question) -> None:
            with _noted(failed):
                await asyncio.wait_for(condition.run(program, question, play), PATIENCE)

        performed = await bench.perform(cell, play, run)
        failed += [
            f"an adapter's problem: {text}" for each in performed for text in each.attempt.active.recording.problems
        ]
        return recorded_by_agl(performed), failed


def recorded_by_agl(performed: Sequence[Performed]) -> Recorded:
    """What the episodes say, and what they say is missing."""
    responses = [
        _of_transition(rollout, each) for rollout, one in enumerate(performed) for each in one.episode.transitions
    ]
    missing = frozenset(evidence for one in performed for evidence in _missing(one.episode))
    return Recorded(tuple(responses), missing)


def _missing(episode: Episode) -> Iterator[str]:
    yield from health_of(episode).missing
    if episode.unjoined:
        yield Evidence.TOOL_RESULTS


def _of_transition(rollout: int, transition: Transition) -> Response:
    tools = [Tool(e.tool_call_id, e.tool, as_json(e.arguments), str(e.status)) for e in transition.tool_results]
    return Response(
        rollout,
        transition.response.get("content") or "",
        tuple(call["id"] for call in transition.response.get("tool_calls") or ()),
        transition.agent,
        token_ids(transition.prompt_ids),
        token_ids(transition.response_ids),
        tuple(tools),
    )


class Spans(Recorder):
    """Joins by the ids and the parents of spans."""

    name = "OpenTelemetry exporter"

    async def record(self, bench: Bench, cell: Cell, condition: Condition, play: Play) -> tuple[Recorded, list[str]]:
        with exported_spans() as spans:
            failed = await _outside(bench, cell, condition, play, bench.stack.server.base_url)
        return Recorded(tuple(responses_of_spans(spans))), failed


@dataclass(frozen=True)
class Logged:
    """A request and its reply."""

    request: Mapping[str, Any]
    choices: Sequence[Mapping[str, Any]]
    """As messages: the pieces of a stream are put together."""


class LoggingProxy(Relay):
    """Stands before a model server, and logs its chat completions."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.log: list[Logged] = []

    async def relay(self, request: web.Request) -> web.StreamResponse:
        passed = await self.pass_on(request, **{"Accept-Encoding": "identity"})
        response = passed.response()
        if passed.status == 200 and request.path.endswith("/chat/completions"):
            self.log.append(Logged(json.loads(passed.asked), _choices(passed.reply, response.content_type)))
        return response


def _choices(payload: bytes, content_type: str) -> list[dict[str, Any]]:
    if content_type != "text/event-stream":
        return [choice["message"] for choice in json.loads(payload)["choices"]]
    lines = (line.removeprefix("data: ") for line in payload.decode().splitlines() if line.startswith("data: {"))
    messages: dict[int, dict[str, Any]] = {}
    for piece in (choice for line in lines for choice in json.loads(line)["choices"]):
        message = messages.setdefault(piece["index"], {"content": "", "tool_calls": {}})
        message["content"] += piece["delta"].get("content") or ""
        for part in piece["delta"].get("tool_calls") or ():
            call = message["tool_calls"].setdefault(
                part["index"], {"id": "", "function": {"name": "", "arguments": ""}}
            )
            call["id"] += part.get("id") or ""
            for name in ("name", "arguments"):
                call["function"][name] += (part.get("function") or {}).get(name) or ""
    return [{**each, "tool_calls": list(each["tool_calls"].values())} for each in messages.values()]


def responses_of_log(log: Sequence[Logged]) -> Iterator[Response]:
    """Each reply, with the tool results that later requests show. No agent has a name, no tool result a status."""
    shown = {
        message["tool_call_id"] for logged in log for message in logged.request["messages"] if message["role"] == "tool"
    }
    for message in (message for logged in log for message in logged.choices):
        calls = message.get("tool_calls") or ()
        tools = [
            Tool(call["id"], call["function"]["name"], as_json(call["function"]["arguments"]), None)
            for call in calls
            if call["id"] in shown
        ]
        ids = tuple(call["id"] for call in calls)
        yield Response(None, message.get("content") or "", ids, None, None, None, tuple(tools))


class Proxy(Recorder):
    """Joins by what is in the messages."""

    name = "logging proxy"

    async def record(self, bench: Bench, cell: Cell, condition: Condition, play: Play) -> tuple[Recorded, list[str]]:
        async with LoggingProxy(bench.stack.server.base_url) as proxy:
            failed = await _outside(bench, cell, condition, play, proxy.url)
        return Recorded(tuple(responses_of_log(proxy.log))), failed


async def _outside(bench: Bench, cell: Cell, condition: Condition, play: Play, root: str) -> list[str]:
    """Play a cell with nothing of agl in the agent's process; what failed.

    The gateway is no more than the model server here: it knows nothing but the key of one attempt.
    """
    failed: list[str] = []
    bench.stack.upstream.answer = play
    attempt = await bench.stack.attempt()
    async with LossyRelay(root) as relay:
        relay.lose(cell.scenario.lost)
        url, key = f"{relay.url}{rollout_path(*attempt.key)}", attempt.active.api_key
        with cell.driver.attached(NOTHING):
            program = cell.driver.build(cell.scenario, Setting(cell.api, cell.streaming, NOTHING, url, key))
            asked = [Question(text, url, key) for text in cell.scenario.questions()]
            with _noted(failed):
                together = asyncio.gather(*(condition.run(program, question, play) for question in asked))
                await asyncio.wait_for(together, PATIENCE)
    await attempt.close()
    return failed


@contextlib.contextmanager
def _noted(failed: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        failed.append(f"{type(error).__name__}: {error}"[:300])


RECORDERS: Mapping[str, Recorder] = {each.name: each for each in (Agl(), Proxy(), Spans())}
