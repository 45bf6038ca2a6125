"""The example's task source, as a plugin: `[tasks.train] source = "sums"`, `split = "train"`.

The questions are those of reasoning-gym's `chain_sum`, word for word, with two or three terms of one digit.
"""

from __future__ import annotations

import itertools
import random
from enum import StrEnum
from functools import cache

import agl_core
from agl_core.types import Task

QUESTION = "State the final answer to the following arithmetic problem: {} ="
LENGTHS = (2, 3)
HELD_OUT_PER_LENGTH = 50
HELD_OUT_SEED = 0


class Split(StrEnum):
    """Which questions: training never meets one of `eval`."""

    TRAIN = "train"
    EVAL = "eval"


Sum = tuple[int | str, ...]
"""Terms and signs in turn: (4, '+', 3)."""


@cache
def drawn_from(split: Split, terms: int) -> list[Sum]:
    """The sums of this many terms from 0 to 9 in a split; those of `eval` in a fixed random order."""
    signed = itertools.product(range(10), *itertools.repeat(range(-10, 10), terms - 1))
    every: list[Sum] = [
        (first, *itertools.chain.from_iterable(("+", n) if n >= 0 else ("-", ~n) for n in rest))
        for first, *rest in signed
    ]
    held_out = random.Random(HELD_OUT_SEED).sample(every, HELD_OUT_PER_LENGTH)
    return held_out if split is Split.EVAL else [each for each in every if each not in held_out]


def result(terms: Sum) -> int:
    total = 0
    for sign, number in zip(("+", *terms[1::2]), terms[::2], strict=True):
        total += int(number) if sign == "+" else -int(number)
    return total


@agl_core.endless_task_source(held_out=len(LENGTHS) * HELD_OUT_PER_LENGTH)
def sums(index: int, seed: int, *, split: Split) -> Task:
    """Sums of each length alike. The result is metadata, which the agent does not see."""
    if split is Split.TRAIN:
        rng = random.Random(f"{seed} {index}")
        drawn = rng.choice(drawn_from(split, rng.choice(LENGTHS)))
    else:
        place, length = divmod(index, len(LENGTHS))
        drawn = drawn_from(split, LENGTHS[length])[place]
    question = QUESTION.format(" ".join(map(str, drawn)))
    metadata = {"result": str(result(drawn)), "terms": len(drawn[::2])}
    return Task(f"{split}-{index}", {"question": question}, split, metadata)
