"""Made-up facts as a graph, and what is made of them: passages, and chains of relations to ask about.

Made-up worlds look like the corpus. The policy's warm-up happens there, so that it learns to read and not to remember.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from retrieval import Passage

COUNTRY_PATHS = (("capital",), ("calling code",), ("currency",), ("currency", "code"))
"""Relations of a country that can be asked for."""

KINDS = ("province", "district", "municipality", "region", "state", "department", "county", "governorate")
"""Kinds of a region or a district."""


@dataclass(frozen=True)
class Entity:
    """Something with passages of its own: one for each fact."""

    kind: str
    """city, district (part of a region), region, element, country, currency."""
    name: str
    facts: dict[str, str]
    """The facts in its passages, by relation; the value may be another entity's name."""
    texts: dict[str, str]
    country: str


def city(name: str, country: str) -> Entity:
    return Entity("city", name, {"country": country}, {"country": f"A city in {country}."}, country)


def region(name: str, kind: str, country: str) -> Entity:
    return Entity("region", name, {"country": country}, {"country": f"A {kind} of {country}."}, country)


def district(name: str, kind: str, part_of: str, country: str) -> Entity:
    return Entity("district", name, {"region": part_of}, {"region": f"A {kind} of {part_of}."}, country)


def element(name: str, country: str) -> Entity:
    text = f"A chemical element whose discovery country is {country}."
    return Entity("element", name, {"discovery country": country}, {"discovery country": text}, country)


def currency(name: str, code: str, country: str) -> Entity:
    return Entity("currency", name, {"code": code}, {"code": f"A currency whose code is {code}."}, country)


def country(name: str, facts: dict[str, str]) -> Entity:
    """Its facts are capital, currency and calling code."""
    texts = {relation: f"A country whose {relation} is {value}." for relation, value in facts.items()}
    return Entity("country", name, facts, texts, name)


class World:
    """Entities by name. A name is one entity's alone."""

    def __init__(self, entities: Sequence[Entity]) -> None:
        self.entities = {each.name: each for each in entities}
        if len(self.entities) != len(entities):
            raise ValueError("two entities have the same name")
        self._shared = _more_than_once([each.facts["currency"] for each in entities if each.kind == "country"])

    def passages(self) -> list[Passage]:
        return [Passage(each.name, text) for each in self.entities.values() for text in each.texts.values()]

    def paths(self, start: Entity) -> Iterator[tuple[str, ...]]:
        """Chains of two to four relations that start at an entity; none at a country or a currency.

        A currency is only asked for if one country alone has it: else it could be guessed.
        """
        if start.kind in ("country", "currency"):
            return
        [first] = start.facts
        head = (first, "country") if start.kind == "district" else (first,)
        if len(head) > 1:
            yield head
        money = self.entities[start.country].facts["currency"]
        for path in COUNTRY_PATHS:
            if path[0] != "currency" or (money in self.entities and money not in self._shared):
                yield head + path


def ask(name: str, path: Sequence[str]) -> str:
    """The one way of asking: relations from the last to the first.

    >>> ask("Bologna", ["country", "capital"])
    'What is the capital of the country of Bologna?'
    """
    return f"What is the {' of the '.join(reversed(path))} of {name}?"


def _more_than_once(names: Sequence[str]) -> set[str]:
    return {each for each in names if names.count(each) > 1}
