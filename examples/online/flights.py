"""Flights and their fares, and what travellers ask for: a flight to a city, or one with an airline of their choice.

>>> Wish("Rome", "Friday").question
'A flight to Rome on Friday, please.'
>>> Wish("Rome", "Friday", "Kite").question
'A flight to Rome on Friday with Kite, please.'
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

CITIES = ("Rome", "Oslo", "Paris", "Cairo", "Lima", "Delhi", "Tokyo", "Quito")
AIRLINES = ("Nova", "Lumo", "Aero", "Kite", "Zephyr", "Delta", "Orbit", "Swift")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclass(frozen=True)
class Wish:
    city: str
    day: str
    airline: str | None = None
    """None: any airline."""

    @property
    def question(self) -> str:
        airline = "" if self.airline is None else f" with {self.airline}"
        return f"A flight to {self.city} on {self.day}{airline}, please."

    @property
    def result(self) -> int:
        """The end of the right answer."""
        return fare(self.city, self.airline)


def fare(city: str, airline: str | None) -> int:
    """The fare of a flight, on any day; one with a named airline costs more than the cheapest one.

    >>> all(fare(city, airline) > fare(city, None) for city in CITIES for airline in AIRLINES)
    True
    """
    place = zlib.crc32(f"{city}/{airline or 'cheapest'}".encode())
    return 10 * (1 + place % 4 if airline is None else 5 + place % 5)
