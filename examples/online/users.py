"""Simulated travellers, who use the desk over HTTP, and say by a thumb whether the answer was right.

    python examples/online/users.py --url http://127.0.0.1:8123 --log sessions.jsonl   # keys in the environment

Each traveller has one session. The first ones name no airline; from the `shift`-th on, most do. Some never give
feedback. What each wants and whether they give feedback follows from the seed alone. They stop after `sessions`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from desk import Answer, answer
from flights import AIRLINES, CITIES, DAYS, Wish
from openai import APIConnectionError, AsyncOpenAI, InternalServerError

APPLICATION_KEY, FEEDBACK_KEY = "DESK_KEY", "DESK_FEEDBACK_KEY"
NAMING_SHARE = 0.75
"""The share of travellers who name an airline, from the shift on."""
FEEDBACK_SHARE = 0.8
"""The share of travellers who say how it was."""
_PAUSE = 0.2
"""Seconds before a traveller tries again while the server is away."""


@dataclass(frozen=True)
class Traveller:
    number: int
    wish: Wish
    gives_feedback: bool


@dataclass(frozen=True)
class Visit:
    """A session that has ended."""

    number: int
    ended: float
    """Unix seconds."""
    names_airline: bool
    right: bool
    thumbs: float | None
    """The traveller's words; None: nothing."""


def travellers(seed: int, shift: int) -> Iterator[Traveller]:
    """A crowd without end; the same for the same arguments, always."""
    for number in itertools.count():
        rng = random.Random(f"traveller/{seed}/{number}")
        city, day, airline = rng.choice(CITIES), rng.choice(DAYS), rng.choice(AIRLINES)
        names_airline = rng.random() < NAMING_SHARE and number >= shift
        wish = Wish(city, day, airline if names_airline else None)
        yield Traveller(number, wish, rng.random() < FEEDBACK_SHARE)


def is_right(said: str, wish: Wish) -> bool:
    """True if an answer ends with the fare that was asked for.

    >>> wish = Wish("Rome", "Friday", "Kite")
    >>> is_right("It costs 70.", wish), is_right("It costs 20.", wish)
    (True, False)
    """
    numbers = re.findall(r"\d+", said)
    return bool(numbers) and int(numbers[-1]) == wish.result


def honest(right: bool, number: int) -> float:
    """The thumb of a traveller who says what was so."""
    return float(right)


@dataclass(frozen=True)
class Crowd:
    """Travellers, a few at a time, on one server."""

    url: str
    key: str
    feedback_key: str
    seed: int
    sessions: int
    shift: int
    at_once: int = 8
    thumb: Callable[[bool, int], float] = honest
    """The thumb that is sent, by whether the answer was right and the traveller's number."""

    async def visit(self, ended: Callable[[Visit], bool]) -> None:
        """Let them come; `ended` is called with each session, and says whether more should."""
        coming = itertools.islice(travellers(self.seed, self.shift), self.sessions)
        more = True
        async with (
            httpx.AsyncClient(trust_env=False, timeout=60) as http,
            AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0) as client,
        ):

            async def one_after_another() -> None:
                nonlocal more
                while more and (each := next(coming, None)) is not None:
                    more = ended(await self._session(each, client, http)) and more

            await asyncio.gather(*(one_after_another() for _ in range(self.at_once)))

    async def _session(self, each: Traveller, client: AsyncOpenAI, http: httpx.AsyncClient) -> Visit:
        said = await self._answer(each, client)
        right = is_right(said.text, each.wish)
        thumbs = self.thumb(right, each.number) if each.gives_feedback else None
        if thumbs is not None:
            feedback = {"call": said.reply, "rewards": {"thumbs": thumbs}, "id": f"thumb-{self.seed}-{each.number}"}
            await self._post(http, "feedback", self.feedback_key, feedback)
        await self._post(http, "sessions/end", self.key, {"session": self._name(each)})
        return Visit(each.number, time.time(), each.wish.airline is not None, right, thumbs)

    async def _answer(self, each: Traveller, client: AsyncOpenAI) -> Answer:
        while True:
            try:
                of_session = client.with_options(default_headers={"x-agl-session": self._name(each)})
                return await answer(each.wish.question, of_session)
            except (APIConnectionError, InternalServerError):
                await asyncio.sleep(_PAUSE)

    async def _post(self, http: httpx.AsyncClient, route: str, key: str, body: dict[str, Any]) -> None:
        """Sending something again changes nothing."""
        while True:
            try:
                headers = {"Authorization": f"Bearer {key}"}
                response = await http.post(f"{self.url}/agl/v1/{route}", json=body, headers=headers)
                if response.status_code < 500:
                    response.raise_for_status()
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(_PAUSE)

    def _name(self, each: Traveller) -> str:
        return f"traveller-{self.seed}-{each.number}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="the address of the server, without /v1")
    parser.add_argument("--log", type=Path, required=True, help="a line for each session")
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--shift", type=int, default=500, help="from which session on travellers name airlines")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    keys = os.environ[APPLICATION_KEY], os.environ[FEEDBACK_KEY]
    crowd = Crowd(options.url, *keys, options.seed, options.sessions, options.shift)
    with options.log.open("a", buffering=1) as log:
        asyncio.run(crowd.visit(lambda visit: log.write(json.dumps(asdict(visit)) + "\n") > 0))


if __name__ == "__main__":
    main()
