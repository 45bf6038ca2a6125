"""What the model says in a scenario, and a way to the gateway on which replies get lost."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass

from aiohttp import web

from agl_core.server.gateway.retries import HEADER_STAINLESS
from agl_core.testing.adapters.scenario import Scenario
from agl_core.testing.http import Relay
from agl_core.testing.scripts import Fail, Received, Step

_MEET = 20.0
"""Seconds that requests which are to be there together wait for each other."""


@dataclass(frozen=True)
class Answered:
    """A request of an agent of the scenario, and the reply that it got."""

    received: Received
    agent: str
    rollout: int
    """Which of the scenario's rollouts it belongs to, by its question."""
    step: Step


class Play:
    """The answers of a scripted model server while a scenario is played.

    An agent is known by its system prompt; each of its requests gets the next reply of its script.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.faults: list[str] = []
        """What went against the script."""
        self.answered: list[Answered] = []
        """What was asked and answered by the script so far."""
        self._agents = {each.name: each for each in scenario.everyone()}
        self._together = scenario.together
        self._arrived: Counter[str] = Counter()
        self._told: Counter[tuple[str, int]] = Counter()
        self._met = asyncio.Event()

    async def __call__(self, received: Received) -> Step:
        text = json.dumps(received.body["messages"])
        name = next((each for each in self._agents if f"You are {each}." in text), None)
        if name is None:
            return self._fault("A request has the system prompt of no agent of the scenario", text)
        await self._meet(name)
        numbered = re.search(r"#(\d+)", text)
        rollout = int(numbered[1]) if numbered else 0
        place = (name, rollout)
        self._told[place] += 1
        says = self._agents[name].says
        if self._told[place] > len(says):
            return self._fault(f"{name} calls more often than its script has replies", text)
        step = says[self._told[place] - 1]
        self.answered.append(Answered(received, name, rollout, step))
        return step

    async def _meet(self, name: str) -> None:
        self._arrived[name] += 1
        if self._arrived[name] > self._together.get(name, 0):
            return
        if all(self._arrived[each] >= count for each, count in self._together.items()):
            self._met.set()
        try:
            await asyncio.wait_for(self._met.wait(), _MEET)
        except TimeoutError:
            self.faults.append(f"{name}'s request waited {_MEET:g} s for those that were to run beside it")

    def _fault(self, text: str, messages: str) -> Fail:
        self.faults.append(f"{text}: {messages[:2000]}")
        return Fail(400)


class LossyRelay(Relay):
    """Stands before the gateway; of each scenario's `lost` requests, it hears the reply out and hangs up."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._lost: frozenset[int] = frozenset()
        self._count = 0

    def lose(self, lost: frozenset[int]) -> None:
        """These requests from now on, counted without their retries."""
        self._lost, self._count = lost, 0

    async def relay(self, request: web.Request) -> web.StreamResponse:
        """Pass it on, and hang up on one that is to be lost."""
        is_retry = request.headers.get(HEADER_STAINLESS, "0") != "0"
        number = self._count
        self._count += not is_retry
        passed = await self.pass_on(request)
        if number in self._lost and not is_retry:
            assert request.transport is not None
            request.transport.close()
        return passed.response()
