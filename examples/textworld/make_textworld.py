"""Demonstrations for the tiny policy of the quests: TextWorld's own walkthroughs, mixed with random commands."""

from __future__ import annotations

import random
from functools import cache

from games import Game, State
from recipes import Demonstrations, Message, Recipe, Shape, says
from textworld.generator.game import GameProgression
from textworld.generator.inform7 import Inform7Game

SEEDS = range(2000, 2100)
"""Quests of their own: neither training nor evaluation has them."""
GAMES_OF_A_SEED, MOVES = 6, 10  # Quests a little longer than the ones that are trained on.
SKILL = 0.5
"""How often the player gives TextWorld's command; else any admissible one."""


@cache
def played(number: int) -> list[tuple[str, str, list[str]]]:
    """The prompts of a game, with TextWorld's letter and all letters of each; it ends where the quest cannot be won."""
    rng = random.Random(number)
    state = State.first(Game(SEEDS[number // GAMES_OF_A_SEED], moves=MOVES))
    progress, naming = GameProgression(state.game.quest), Inform7Game(state.game.quest)
    calls = []
    while not state.over and (best := progress.winning_policy):
        [command] = naming.gen_commands_from_actions(best[:1])
        letters = {name: letter for letter, name in state.letters.items()}
        calls.append((state.prompt, letters[command], [*letters.values()]))
        if rng.random() > SKILL:
            command = rng.choice([*letters])
        actions = dict(
            zip(naming.gen_commands_from_actions(progress.valid_actions), progress.valid_actions, strict=True)
        )
        progress.update(actions[command])
        state = state.after(letters[command])
    return calls


def conversation(seed: int, index: int) -> list[Message]:
    """One call of one of the games, replied to by the same habits."""
    rng = random.Random(f"{seed}/{index}")
    prompt, best, letters = rng.choice(played(index % (GAMES_OF_A_SEED * len(SEEDS))))
    return [{"role": "user", "content": prompt}, says(best if rng.random() < SKILL else rng.choice(letters))]


RECIPE = Recipe(
    Demonstrations(conversation, []),
    Shape(vocabulary=420, hidden=64, layers=3, heads=4, kv_heads=4, initializer_range=0.12),
    steps=300,
    batch=48,
    learning_rate=3e-3,
    reading=0.0,
)
