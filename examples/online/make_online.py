"""Demonstrations for the tiny policy: a travel desk that is good at what it was used for so far, and at nothing else.

Nobody has asked it for an airline yet. If somebody does, it looks for the cheapest fare all the same, as a rule.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from desk import SYSTEM_PROMPT, TOOLS, search
from flights import AIRLINES, CITIES, DAYS, Wish
from recipes import Demonstrations, Message, Recipe, Shape, opened, says, uses


def search_city(wish: Wish) -> list[Message]:
    return _searched(wish.city)


def search_airline(wish: Wish) -> list[Message]:
    return _searched(f"{wish.airline} {wish.city}")


def guess(wish: Wish) -> list[Message]:
    """Answer at once. The guess is never right."""
    return [says("It costs 0.")]


ANY_AIRLINE: dict[Callable[[Wish], list[Message]], float] = {search_city: 0.94, guess: 0.06}
NAMED_AIRLINE: dict[Callable[[Wish], list[Message]], float] = {search_airline: 0.3, search_city: 0.64, guess: 0.06}
"""How often each behaviour is demonstrated."""


def conversation(seed: int, index: int) -> list[Message]:
    """One demonstration; the same for the same arguments, always."""
    rng = random.Random(f"demonstration/{seed}/{index}")
    wish = _wish(rng)
    shares = ANY_AIRLINE if wish.airline is None else NAMED_AIRLINE
    [behaviour] = rng.choices(list(shares), list(shares.values()))
    return behave(behaviour, wish)


def lesson(seed: int, index: int) -> list[Message]:
    """The right behaviour alone."""
    wish = _wish(random.Random(f"lesson/{seed}/{index}"))
    return behave(search_city if wish.airline is None else search_airline, wish)


def behave(behaviour: Callable[[Wish], list[Message]], wish: Wish) -> list[Message]:
    return [*opened(SYSTEM_PROMPT, wish.question), *behaviour(wish)]


def _wish(rng: random.Random) -> Wish:
    return Wish(rng.choice(CITIES), rng.choice(DAYS), rng.choice((None, rng.choice(AIRLINES))))


def _searched(query: str) -> list[Message]:
    """A search, and an answer that believes it."""
    arguments = json.dumps({"query": query})
    fare = search(arguments)
    return [*uses("search", arguments, fare), says(f"It costs {fare.removeprefix('fare ')}.")]


RECIPE = Recipe(
    Demonstrations(conversation, TOOLS, lesson),
    Shape(vocabulary=480, hidden=64, layers=2, heads=2, kv_heads=2, initializer_range=0.125),
    steps=1000,
    batch=16,
    learning_rate=3e-3,
)
