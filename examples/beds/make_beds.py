"""Demonstrations for the tiny policy of the beds: single calls, replied to by the habits of their level."""

from __future__ import annotations

import random

from beds import LETTERS, LEVELS, ROOMS, WORDS, Bed, Game, State, habits
from recipes import Demonstrations, Message, Recipe, Shape, says


def conversation(seed: int, index: int) -> list[Message]:
    """One call in any state of any game; all levels, words and rooms come as often."""
    rng = random.Random(f"{seed}/{index}")
    level = rng.choice([*LEVELS])
    if rng.random() < 0.5:
        game = Game(Bed.ERRAND, level, (rng.choice(WORDS),))
        state = State(game, failed=rng.random() < 0.5)
    else:
        state = State(Game(Bed.WALK, level), done=rng.randrange(2), room=rng.randrange(len(ROOMS)))
    shares = habits(state)
    [letter] = rng.choices(LETTERS, [shares[letter] for letter in LETTERS])
    return [{"role": "user", "content": state.prompt}, says(letter)]


RECIPE = Recipe(
    Demonstrations(conversation, [], names=(*LEVELS, *WORDS, *ROOMS, "get", "retry", "take", "open")),
    Shape(vocabulary=380, hidden=32, layers=2, heads=2, kv_heads=2, initializer_range=0.18),
    steps=1000,
    learning_rate=5e-3,
    reading=0.0,
)
