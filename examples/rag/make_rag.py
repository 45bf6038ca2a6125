"""Demonstrations for the tiny policy before it is trained: searching in made-up worlds, seldom to the end.

Every name is made up, so that the policy learns to copy names and knows none. In each situation the agent chooses by
fixed shares; what it did wrong before does not matter. Mostly it gives up at once, or stops halfway, so that greedy
decoding never succeeds, and sampling does so now and then.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache

from musique import read_questions
from recipes import Demonstrations, Message, Recipe, Shape, chooser, opened, says, uses
from retrieval import CORPUS, Index, read_passages
from search_tool import INSTRUCTIONS, PASSAGES, listed, search
from worlds import KINDS, Entity, World, ask, city, country, currency, district, element, region

TOOLS = [
    {
        "type": "function",
        "function": {"name": search.name, "description": search.description, "parameters": search.params_json_schema},
    }
]
"""The agent's tool as the Agents SDK sends it."""

NO_ANSWER = "I did not find the answer."
MOST_REPLIES = 6
"""The agent's own limit."""
EXERCISES = 6
CONVERSATIONS_PER_WORLD = 64
COUNTRIES = 16
QUESTIONS = (CORPUS.with_name("train.jsonl.gz"), CORPUS.with_name("eval.jsonl.gz"))
SUBJECTS = {
    "region": "district",
    "country": "place",
    "discovery country": "element",
    "capital": "country",
    "calling code": "country",
    "currency": "country",
    "code": "currency",
}
"""The subject of a relation, by kind."""
VALUES = {"region": "place", "discovery country": "country"}
"""The kind of its value, where that is not the kind of the same name."""
VALUE = re.compile(r" (?:of|in|is) ([A-Z0-9+].*)\.$")
"""The value that a passage tells: it ends with it."""
HOPS = {2: 0.45, 3: 0.35, 4: 0.20}


class Choice(StrEnum):
    """The next move."""

    GIVE_UP = "answer nothing, and not in the form that was asked for"
    GUESS = "answer without a search, with the name in the question"
    SEARCH_WITHOUT_NAME = "forget who it is about"
    SEARCH_NEXT = "search for the next hop"
    SEARCH_AGAIN = "the same as before"
    ANSWER = "answer with the last value found: right if it was the last hop"


@dataclass(frozen=True)
class Asked:
    """A question, and the way to its answer."""

    question: str
    queries: tuple[str, ...]
    """The right search of each hop."""
    values: tuple[str, ...]
    """The value of each hop; the last is the answer."""
    index: Index

    def move(self, choice: Choice, hops: int) -> tuple[str | None, str]:
        """The search of a choice, or the answer, when so many hops are found."""
        match choice:
            case Choice.GIVE_UP:
                return None, NO_ANSWER
            case Choice.GUESS:
                return None, f"Answer: {self.queries[0].partition(' of ')[2]}"
            case Choice.ANSWER:
                return None, f"Answer: {self.values[hops - 1]}"
            case Choice.SEARCH_WITHOUT_NAME:
                return f"{self.queries[-1].partition(' of ')[0]} of the country", ""
            case Choice.SEARCH_NEXT | Choice.SEARCH_AGAIN:
                return self.queries[hops - (choice is Choice.SEARCH_AGAIN)], ""


class Situation(StrEnum):
    """How far the agent is."""

    START = "it has searched nothing"
    LOST = "it has searched for something else"
    HALFWAY = "it has found a step, and not the last one"
    FOUND = "it has found the answer"


SHARES: dict[Situation, dict[Choice, float]] = {
    Situation.START: {
        Choice.GIVE_UP: 0.7,
        Choice.GUESS: 0.02,
        Choice.SEARCH_WITHOUT_NAME: 0.06,
        Choice.SEARCH_NEXT: 0.22,
    },
    Situation.LOST: {Choice.GIVE_UP: 0.6, Choice.SEARCH_NEXT: 0.4},
    Situation.HALFWAY: {Choice.ANSWER: 0.35, Choice.SEARCH_AGAIN: 0.2, Choice.SEARCH_NEXT: 0.45},
    Situation.FOUND: {Choice.GIVE_UP: 0.6, Choice.SEARCH_AGAIN: 0.1, Choice.ANSWER: 0.3},
}
"""How often each choice is demonstrated in each situation."""
FLAWLESS: dict[Situation, Choice] = {
    Situation.START: Choice.SEARCH_NEXT,
    Situation.HALFWAY: Choice.SEARCH_NEXT,
    Situation.FOUND: Choice.ANSWER,
}
"""The moves that lead to the answer."""


def conversation(seed: int, index: int) -> list[Message]:
    """One demonstration; the same for the same arguments, always."""
    return behave(task_at(seed, index), chooser(f"demonstration/{seed}/{index}", SHARES))


def lesson(seed: int, index: int) -> list[Message]:
    """The same of an agent that makes no mistake, or, every fourth time, nothing but first searches: names to copy."""
    if index % 4:
        return _flawless(task_at(seed, index))
    questions = [task_at(seed, index * EXERCISES + number) for number in range(EXERCISES)]
    return [message for task in questions for message in _flawless(task)[1:3]]


def _flawless(task: Asked) -> list[Message]:
    return behave(task, lambda situation: FLAWLESS[situation])


def behave(task: Asked, choose: Callable[[Situation], Choice]) -> list[Message]:
    messages = opened(INSTRUCTIONS, task.question)
    hops, situation = 0, Situation.START
    for turn in range(MOST_REPLIES):
        query, answer = task.move(choose(situation), hops)
        if query is None:
            return [*messages, says(answer)]
        passages = "\n".join(_found(task.index, query))
        messages += uses(search.name, json.dumps({"query": query}), passages, f"call_{turn}")
        hops += hops < len(task.queries) and query == task.queries[hops]
        situation = Situation.FOUND if hops == len(task.queries) else Situation.HALFWAY if hops else Situation.LOST
    return messages[:-1]


def task_at(seed: int, index: int) -> Asked:
    """A question about a made-up world whose searches find what they should."""
    world, searched = _made_up(seed, index // CONVERSATIONS_PER_WORLD)
    rng = random.Random(f"question/{seed}/{index}")
    starts = list(world.entities.values())
    while True:
        [hops] = rng.choices(list(HOPS), list(HOPS.values()))
        start = rng.choice(starts)
        paths = [path for path in world.paths(start) if len(path) == hops]
        if not paths:
            continue
        task = follow(world, start, rng.choice(paths), searched)
        steps = zip(task.queries, task.values, strict=True)
        if all(_found(searched, query)[0].endswith(f" {value}.") for query, value in steps):
            return task


def follow(of: World, start: Entity, path: Sequence[str], index: Index) -> Asked:
    """The question of a chain of relations, and its searches."""
    queries, values, at = [], [], start.name
    for relation in path:
        queries.append(f"{relation} of {at}")
        at = of.entities[at].facts[relation]
        values.append(at)
    return Asked(ask(start.name, path), tuple(queries), tuple(values), index)


@lru_cache(maxsize=4096)
def _found(index: Index, query: str) -> tuple[str, ...]:
    return tuple(map(listed, index.best(query, PASSAGES)))


@lru_cache(maxsize=4)
def _made_up(seed: int, number: int) -> tuple[World, Index]:
    """A small world: the corpus's names, and made-up facts."""
    rng = random.Random(f"world/{seed}/{number}")
    known = names()
    drawn = {kind: iter(rng.sample(subjects, len(subjects))) for kind, subjects in known.items()}
    entities: list[Entity] = []
    for _ in range(COUNTRIES):
        land, money = next(drawn["country"]), next(drawn["currency"])
        part, kind = next(drawn["place"]), rng.choice(KINDS)
        entities += [
            country(land, {of: next(drawn[of]) for of in ("capital", "calling code")} | {"currency": money}),
            currency(money, next(drawn["code"]), land),
            element(next(drawn["element"]), land),
            *(city(next(drawn["place"]), land) for _ in range(3)),
            region(part, kind, land),
            *(district(next(drawn["district"]), kind, part, land) for _ in range(3)),
        ]
    world = World(entities)
    return world, Index.build(world.passages())


@cache
def names() -> dict[str, list[str]]:
    """The names in the questions, by kind. Facts stay apart from each other: what belongs together is not kept."""
    names_of: dict[str, set[str]] = {}
    for question in (question for file in QUESTIONS for question in read_questions(file)):
        subject = question.question_decomposition[0].question.partition(" >> ")[0]
        for step in question.question_decomposition:
            relation = step.question.partition(" >> ")[2]
            names_of.setdefault(SUBJECTS[relation], set()).add(subject)
            names_of.setdefault(VALUES.get(relation, relation), set()).add(step.answer)
            subject = step.answer
    taken: set[str] = set()
    return {kind: sorted(_new(values, taken)) for kind, values in names_of.items()}


@cache
def written() -> list[str]:
    """Every name that the corpus writes: what its passages are about, and what they tell of it."""
    passages = list(read_passages(CORPUS))
    values = {match[1] for p in passages if (match := VALUE.search(p.text))}
    return sorted(values.union(*names().values(), (p.title for p in passages)))


def _new(values: set[str], taken: set[str]) -> set[str]:
    new = values - taken
    taken |= new
    return new


PHRASES = (
    '<tool_call>\n{"name": "search", "arguments": {"query": "',
    '"}}\n</tool_call>',
    f"{INSTRUCTIONS}\n<tools>\nsearch(query)\n</tools>",
    NO_ANSWER,
    "What is the",
    " of the",
    *(f": A country whose {relation} is" for relation in ("capital", "calling code", "currency")),
    ": A city in",
    *(f": A {kind} of" for kind in KINDS),
    ": A currency whose code is",
    ": A chemical element whose discovery country is",
)
"""One token each: what is always the same."""
NAMES = tuple(f" {name}" for name in written())
"""Every name of the corpus is one token too: a tiny policy can copy single tokens."""
RECIPE = Recipe(
    Demonstrations(conversation, TOOLS, lesson, PHRASES, NAMES),
    Shape(
        vocabulary=len(PHRASES) + len(NAMES) + 400,
        hidden=96,
        layers=3,
        heads=4,
        kv_heads=4,
        initializer_range=0.1,
        copies=True,
    ),
    steps=1200,
    batch=16,
    learning_rate=3e-3,
    reading=5 / 6,
)
