"""Demonstrations for the tiny policy of the beds: single calls of games that are played by fixed habits."""

from __future__ import annotations

import random

from beds import MANY, WORDS, Bed, State, outcomes, shares
from recipes import Demonstrations, Message, Recipe, Shape, says


def conversation(seed: int, index: int) -> list[Message]:
    """One call of a game that was played by the habits in `shares`; rare topics come as often as others."""
    rng = random.Random(f"{seed}/{index}")
    bed = rng.choice(list(Bed))
    state: State | None = State(bed, tuple(rng.sample(WORDS, MANY[bed])))
    met: list[tuple[State, str]] = []
    while state is not None:
        [letter] = rng.choices(*zip(*shares(state).items(), strict=True))
        met.append((state, letter))
        possible = outcomes(state, letter)
        [outcome] = rng.choices(possible, [o.chance for o in possible])
        state = outcome.after
    topic = rng.choice(sorted({state.topic for state, _ in met}))
    state, letter = rng.choice([pair for pair in met if pair[0].topic == topic])
    return [{"role": "user", "content": state.prompt}, says(letter)]


RECIPE = Recipe(
    Demonstrations(conversation, []),
    Shape(vocabulary=336, hidden=32, layers=2, heads=2, kv_heads=2, initializer_range=0.18),
    steps=700,
    learning_rate=5e-3,
    reading=0.0,
)
