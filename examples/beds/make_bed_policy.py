"""Make the tiny policy that plays the beds, in a minute or two on one core:

python examples/beds/make_bed_policy.py --out examples/beds/policy
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from beds import MANY, WORDS, Bed, State, outcomes, shares

sys.path.append(str(Path(__file__).parents[1]))
from imitation import Demonstrations, Message, Shape, make


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
        [outcome] = rng.choices(possible, [each.chance for each in possible])
        state = outcome.after
    topic = rng.choice(sorted({each.topic for each, _ in met}))
    state, letter = rng.choice([each for each in met if each[0].topic == topic])
    return [{"role": "user", "content": state.prompt}, {"role": "assistant", "content": letter}]


DEMONSTRATIONS = Demonstrations(conversation, [])
SHAPE = Shape(vocabulary=336, hidden=32, layers=2, heads=2, kv_heads=2, initializer_range=0.18)

if __name__ == "__main__":
    make(DEMONSTRATIONS, SHAPE, steps=700, batch=64, learning_rate=5e-3, beta2=0.98, reading=0.0)
