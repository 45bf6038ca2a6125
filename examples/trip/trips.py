"""Cancelled flights: what a traveller asks, and what only the traveller's records and the airlines know.

>>> trip("train/0/7") == trip("train/0/7")
True
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from enum import StrEnum

CITIES = ("Rome", "Oslo", "Paris", "Cairo", "Lima", "Delhi", "Tokyo", "Quito")
AIRLINES = ("Nova", "Lumo", "Aero", "Kite", "Zephyr", "Delta", "Orbit", "Swift")
_HELD_OUT_ONE_IN = 8


class Split(StrEnum):
    """Which trips may be drawn."""

    TRAIN = "train"
    EVAL = "eval"
    """Pairs of city and airline that training never sees."""


@dataclass(frozen=True)
class Trip:
    """One cancelled flight. The airline and the refund are in memory, the fare is found by a search."""

    city: str
    airline: str
    refund: int
    """The refund for the cancelled flight; always less than the fare."""
    fare: int
    """The fare of another flight."""

    @property
    def question(self) -> str:
        return f"My flight to {self.city} is cancelled. What does another one cost me?"

    @property
    def result(self) -> str:
        """The right answer, as digits."""
        return str(self.fare - self.refund)


def traveller(split: Split, seed: int, index: int) -> str:
    """The name under which a trip is kept. Indices have no end."""
    return f"{split}/{seed}/{index}"


def trip(traveller: str) -> Trip:
    """The trip of a traveller; the same for the same name, always."""
    held_out = Split(traveller.partition("/")[0]) is Split.EVAL
    rng = random.Random(traveller)
    city, airline = rng.choice(CITIES), rng.choice(AIRLINES)
    while pair_is_held_out(city, airline) is not held_out:
        city, airline = rng.choice(CITIES), rng.choice(AIRLINES)
    return Trip(city, airline, refund=10 * rng.randint(1, 4), fare=10 * rng.randint(5, 9))


def pair_is_held_out(city: str, airline: str) -> bool:
    """True if training must never see a flight to this city with this airline."""
    return zlib.crc32(f"{city}/{airline}".encode()) % _HELD_OUT_ONE_IN == 0
